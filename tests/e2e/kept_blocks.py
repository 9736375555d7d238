"""KV blocks that engines keep: for running requests, and for others that have not read them yet."""

from openai_http import OpenAiHttp

from waiting import eventually

#: NIXL's: the worker that has computed a prompt keeps its blocks for a reader that is lost.
LEASE_S = 30


async def kv_usage(client: OpenAiHttp) -> float:
    """How much of the KV caches is in use; blocks that are kept for another worker are."""
    return sum(s.value for s in (await client.metrics()).samples if s.name == "vllm:kv_cache_usage_perc")


async def nothing_is_kept(client: OpenAiHttp, within_s: float) -> None:
    async def is_free() -> bool:
        return not await kv_usage(client)

    await eventually(is_free, "all KV blocks are free", within_s)
