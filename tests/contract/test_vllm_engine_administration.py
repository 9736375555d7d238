"""Administrative calls and metrics of a real engine. Each test leaves it awake and running."""

from contextlib import aclosing

import pytest
from prometheus_client import REGISTRY
from prompt_maker import PromptMaker, encoded
from vllm.lora.request import LoRARequest
from vllm.v1.metrics.reader import get_metrics_snapshot
from vllm.v1.serial_utils import MsgpackEncoder

from medialane.observability import MetricMirror, MetricReader
from medialane.types.admin import (
    AddLora,
    IsPaused,
    IsSleeping,
    PauseGeneration,
    ResetEncoderCache,
    ResetMmCache,
    ResetPrefixCache,
    ResumeGeneration,
    StartProfile,
)
from medialane.types.errors import GenerationFailed, MedialaneError, PromptRejected
from medialane.types.request import EngineRequest, ExpandedPrompt

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.vllm]


@pytest.fixture(scope="module")
def text(renderer):
    tokenizer = PromptMaker(renderer).tokenizer
    return ExpandedPrompt(tokenizer.encode("<|im_start|>user\n" + "hello there " * 100 + "<|im_end|>\n"))


async def cached(engine, text, request_id):
    """How many of the prompt's tokens the engine had."""
    async with aclosing(engine.generate(EngineRequest(request_id, text, encoded(max_tokens=2)), [])) as deltas:
        first, *_ = [delta.num_cached_tokens async for delta in deltas]
    return first


async def test_prefix_cache_is_empty_after_a_reset(vllm_engine, text):
    await cached(vllm_engine, text, "a")
    assert await cached(vllm_engine, text, "b") > 0
    assert await vllm_engine.administer(ResetPrefixCache()) is True
    assert await cached(vllm_engine, text, "c") == 0


async def test_paused_engine_reports_it_and_resumes(vllm_engine, text):
    assert await vllm_engine.administer(IsPaused()) is False
    await vllm_engine.administer(PauseGeneration("keep", clear_cache=False))
    assert await vllm_engine.administer(IsPaused()) is True
    assert await vllm_engine.administer(ResumeGeneration()) is None
    assert await vllm_engine.administer(IsPaused()) is False
    assert await cached(vllm_engine, text, "d") is not None


@pytest.mark.parametrize("call", [ResetMmCache(), ResetEncoderCache()])
async def test_cache_resets_return_nothing(vllm_engine, call):
    assert await vllm_engine.administer(call) is None


async def test_query_returns_a_result(vllm_engine):
    assert await vllm_engine.administer(IsSleeping()) is False


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (AddLora(b"what is this"), PromptRejected),
        (AddLora(bytes(MsgpackEncoder().encode(LoRARequest("a", 1, "/nowhere"))[0])), GenerationFailed),
        (StartProfile("../../etc"), MedialaneError),
    ],
)
async def test_call_rejected_by_vllm_raises_and_the_engine_survives(vllm_engine, text, call, kind):
    with pytest.raises(kind) as failed:
        await vllm_engine.administer(call)
    assert failed.value.message
    assert await cached(vllm_engine, text, "e") is not None


async def test_engine_metrics_are_forwarded_completely(vllm_engine, text):
    reader, mirror = MetricReader(REGISTRY), MetricMirror()

    def prompt_tokens():
        for changes in reader.read():
            mirror.apply(changes)
        (found,) = [v for _, s, v in mirror.samples() if s.name == "vllm:prompt_tokens_total"]
        return found

    before = prompt_tokens()
    await cached(vllm_engine, text, "f")
    assert prompt_tokens() == before + len(text.token_ids)
    carried = {family.name for family, _, _ in mirror.samples()}
    assert carried >= {m.name for m in get_metrics_snapshot()}
    assert all(name.startswith("vllm:") for name in carried)


async def test_statistics_are_logged_at_vllms_interval(vllm_engine, monkeypatch):
    """vLLM's loggers keep what is not logged: that of speculative decoding has three numbers per step."""
    num_logged = 0

    async def log():
        nonlocal num_logged
        num_logged += 1

    monkeypatch.setattr(vllm_engine.llm, "do_log_stats", log)
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.0001")
    await vllm_engine.ping(10)
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "3600")
    await vllm_engine.ping(10)
    assert num_logged == 1
