"""vLLM's flags in a worker: user flags reach vLLM, except those that a worker depends on."""

import pytest
from vllm.sampling_params import SamplingParams

from medialane.core.admin import ResetEncoderCache, ResetPrefixCache, Sleep, WakeUp
from medialane.core.errors import StartupFailed
from medialane.vllm_bridge.engine_embeddings import changes_encoder
from medialane.vllm_bridge.engine_options import engine_args, keep_embeddings
from medialane.vllm_bridge.engine_request import clamp
from medialane.vllm_bridge.seams.encoder_cache import restore_inputs


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


def config_of(model, *flags):
    return engine_args(str(model), ["--enforce-eager", *flags]).create_engine_config()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (['--ec-transfer-config={"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}'], "--ec-transfer-config"),
        (["--language-model-only"], "--language-model-only"),
        (['--limit-mm-per-prompt={"image": 0, "video": 0}'], "does not support media"),
        (['--limit-mm-per-prompt={"image": 0, "video": 0}', "--enable-mm-embeds"], "no media are allowed"),
        (["--mm-encoder-only"], "--mm-encoder-only"),
        (["--video-pruning-rate=0.5"], "--video-pruning-rate"),
        (["--enable-lora", "--enable-tower-connector-lora"], "--enable-tower-connector-lora"),
        (["--pipeline-parallel-size=2"], "pipeline stages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_engine_whose_embeddings_cannot_be_kept_starts_without_or_not_at_all(tiny_model, flags, why):
    config = config_of(tiny_model, *flags)
    before = config.ec_transfer_config
    assert why in keep_embeddings(config, "auto", arena_directory="/nowhere")
    assert config.ec_transfer_config is before
    with pytest.raises(StartupFailed, match=why):
        keep_embeddings(config, "on", arena_directory="/nowhere")


def test_embeddings_are_kept_where_possible_unless_switched_off(tiny_model):
    config = config_of(tiny_model)
    assert keep_embeddings(config, "off", arena_directory="/nowhere") == "--encode-cache off"
    assert config.ec_transfer_config is None
    for wanted in ("auto", "on"):
        assert keep_embeddings(config, wanted, arena_directory="/nowhere") == ""
        assert config.ec_transfer_config.is_ec_consumer
        config.ec_transfer_config = None


def test_restored_inputs_are_those_without_a_connector(tiny_model):
    """EngineCore completes its configuration again, which would enable embeddings sent by clients."""
    for flags in ((), ("--enable-mm-embeds",)):
        config = config_of(tiny_model, *flags)
        assert keep_embeddings(config, "on", arena_directory="/nowhere") == ""
        config.__post_init__()
        media = config.model_config.multimodal_config
        assert media.enable_mm_embeds
        assert media.allow_missing_mm_embeddings
        restore_inputs(config)
        assert (media.enable_mm_embeds, media.allow_missing_mm_embeddings) == (bool(flags), False)


@pytest.mark.parametrize(
    ("call", "expected"),
    [(Sleep(1), False), (Sleep(2), True), (ResetEncoderCache(), True), (ResetPrefixCache(), False), (WakeUp(), False)],
    ids=str,
)
def test_calls_with_which_weights_are_changed(call, expected):
    assert changes_encoder(call) == expected
