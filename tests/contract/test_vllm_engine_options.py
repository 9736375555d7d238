"""vLLM's flags in a worker: user flags reach vLLM, except those that a worker depends on."""

import pytest
from vllm.sampling_params import SamplingParams

from medialane.core.errors import StartupFailed
from medialane.vllm_bridge.engine_options import engine_args
from medialane.vllm_bridge.engine_request import clamp


def test_unsupported_worker_flags_are_rejected(tiny_model, monkeypatch):
    for flag in (
        "--mm-processor-cache-gb=4",
        "--no-enable-prefix-caching",
        "--prefix-caching-hash-algo=sha256",
        '--kv-events-config={"enable_kv_cache_events": true}',
    ):
        with pytest.raises(StartupFailed, match=flag.partition("=")[0]):
            engine_args(str(tiny_model), [flag])
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with pytest.raises(StartupFailed, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        engine_args(str(tiny_model), [])


def test_required_worker_options_are_set(tiny_model):
    args = engine_args(str(tiny_model), ["--max-model-len=1234", "--mm_processor_cache_gb", "0"])
    assert args.max_model_len == 1234
    assert args.mm_processor_cache_gb == 0
    assert args.enable_prefix_caching is True
    assert args.prefix_caching_hash_algo == "sha256_cbor"


def test_unknown_vllm_flag_is_named(tiny_model):
    with pytest.raises(StartupFailed, match="--no-such-flag"):
        engine_args(str(tiny_model), ["--no-such-flag"])


@pytest.mark.parametrize(
    ("asked", "num_prompt_tokens", "granted"), [(50, 10, 50), (500, 10, 90), (None, 10, None), (50, 100, 50)]
)
def test_max_tokens_may_fill_the_context_left_by_the_expanded_prompt(asked, num_prompt_tokens, granted):
    """If nothing is left, vLLM rejects the prompt with its own message."""
    params = SamplingParams(max_tokens=asked, min_tokens=asked or 0)
    clamp(params, {"prompt_token_ids": [1] * num_prompt_tokens}, 100)
    assert (params.max_tokens, params.min_tokens) == (granted, granted or 0)
