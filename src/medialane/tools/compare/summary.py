"""The figures of one side, from the replies of its turns."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from medialane.runtime.host import percentile
from medialane.tools.compare.journal import Turn
from medialane.tools.compare.reply import Reply, Served

#: vLLM's metrics, which medialane's gateway has as well, by our names for them.
COUNTERS: Final = {
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:mm_cache_queries_total": "mm_queries",
    "vllm:mm_cache_hits_total": "mm_hits",
    "vllm:num_preemptions_total": "preemptions",
}


class Slo(msgspec.Struct, frozen=True):
    """What a request must keep to count for the goodput; the defaults are those of vLLM's dashboards."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1

    def is_kept(self, reply: Reply) -> bool:
        """A reply that is not streamed has to be there whole within the time to the first token."""
        first_s = reply.ttft_s if reply.ttft_s is not None else reply.seconds
        return reply.succeeded and first_s <= self.ttft_s and (reply.tpot_s or 0.0) <= self.tpot_s


class Spread(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(statistics.fmean(known), *(percentile(known, share) for share in (0.5, 0.9, 0.99)))


class SideSummary(msgspec.Struct, frozen=True):
    """What one server made of the traffic; None is what it does not say, or what does not apply.

    `prefix_share` is the part of the prompts' tokens that was in the KV cache, `mm_share` that of the items that vLLM's
    cache of processed media had. `caches`, `embeddings`, `copied_bytes` (for each request with media) and `steps_ms`
    (mean durations) are medialane's. `late_s` is how much later than they should have been requests were sent (p99):
    what the client could not keep up with.
    """

    name: str
    num_requests: int
    num_succeeded: int
    errors: dict[str, int]
    wall_s: float
    num_parts: int
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: Spread | None
    tpot_s: Spread | None
    seconds: Spread | None
    goodput_per_s: float
    slo_share: float
    cpu_s_per_request: float | None
    prefix_share: float | None
    mm_share: float | None
    preemptions: int | None
    caches: dict[str, int]
    embeddings: dict[str, int]
    ways: dict[str, int]
    copied_bytes: float | None
    steps_ms: dict[str, float]
    late_s: float


def summarize(name: str, turns: Sequence[Turn], slo: Slo) -> SideSummary:
    replies = [reply for turn in turns for reply in turn.replies]
    good = [reply for reply in replies if reply.succeeded]
    wall_s = sum(turn.facts.wall_s for turn in turns)
    cpus = [turn.facts.cpu_s for turn in turns]
    known_cpu = [cpu for cpu in cpus if cpu is not None]
    counters: Counter[str] = Counter()
    for turn in turns:
        counters.update(turn.facts.counters)
    served = [reply.served for reply in good if reply.served is not None]
    with_media = [each for each in served if each.caches]
    num_kept = sum(map(slo.is_kept, replies))
    return SideSummary(
        name=name,
        num_requests=len(replies),
        num_succeeded=len(good),
        errors=dict(Counter(_reason(reply) for reply in replies if not reply.succeeded).most_common(10)),
        wall_s=wall_s,
        num_parts=max((turn.facts.num_parts for turn in turns), default=0),
        requests_per_s=_rate(len(good), wall_s),
        output_tokens_per_s=_rate(sum(reply.num_tokens for reply in good), wall_s),
        prompt_tokens=sum(reply.prompt_tokens for reply in good),
        output_tokens=sum(reply.num_tokens for reply in good),
        ttft_s=Spread.of(reply.ttft_s for reply in good),
        tpot_s=Spread.of(reply.tpot_s for reply in good),
        seconds=Spread.of(reply.seconds for reply in good),
        goodput_per_s=_rate(num_kept, wall_s),
        slo_share=num_kept / len(replies) if replies else 0.0,
        cpu_s_per_request=sum(known_cpu) / len(replies) if replies and len(known_cpu) == len(cpus) else None,
        prefix_share=_share(counters, "prefix_hits", "prefix_queries"),
        mm_share=_share(counters, "mm_hits", "mm_queries"),
        preemptions=round(counters["preemptions"]) if "preemptions" in counters else None,
        caches=dict(Counter(cache for each in served for cache in each.caches)),
        embeddings=dict(Counter(outcome for each in served for outcome in each.embeddings)),
        ways=dict(Counter(f"{each.stage} ({each.transport})" for each in served if each.stage)),
        copied_bytes=statistics.fmean(each.copied_bytes for each in with_media) if with_media else None,
        steps_ms=_steps(served),
        late_s=percentile([reply.late_s for reply in replies], 0.99) if replies else 0.0,
    )


def _steps(served: Sequence[Served]) -> dict[str, float]:
    """Return the mean duration of each step, over all requests: one that has not had it counts 0."""
    names = dict.fromkeys(name for each in served for name in each.times_ms)
    return {name: statistics.fmean(each.times_ms.get(name, 0.0) for each in served) for name in names}


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _share(counters: Counter[str], part: str, whole: str) -> float | None:
    return counters[part] / counters[whole] if counters.get(whole) else None


def _reason(reply: Reply) -> str:
    return f"{reply.status or 'no response'}: {reply.error[:120]}"
