"""vLLM's flags in a worker: user flags reach vLLM, except the ones that a worker depends on."""

import shutil

import pytest
from vllm.config import KVEventsConfig
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from medialane.types.admin import ResetEncoderCache, ResetPrefixCache, Sleep, WakeUp, changes_encoder
from medialane.types.errors import StartupFailed
from medialane.types.request import EncoderCard
from medialane.vllm_bridge.engine.engine_embeddings import EngineEmbeddings, encoder_digest
from medialane.vllm_bridge.engine.engine_options import engine_args
from medialane.vllm_bridge.engine.engine_request import clamp
from medialane.vllm_bridge.frontend import encode_params
from medialane.vllm_bridge.seams.encoder_cache import restore_inputs
from medialane.vllm_bridge.seams.engine import MsgpackDecoder


def test_unsupported_worker_flags_are_rejected(tiny_model, monkeypatch):
    for flag in (
        "--mm-processor-cache-gb=4",
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
    assert args.create_engine_config().cache_config.enable_prefix_caching is True
    assert args.prefix_caching_hash_algo == "sha256_cbor"


def test_prefix_cache_may_be_switched_off(tiny_model):
    assert config_of(tiny_model, "--no-enable-prefix-caching").cache_config.enable_prefix_caching is False


def test_unknown_vllm_flag_is_named(tiny_model):
    with pytest.raises(StartupFailed, match="--no-such-flag"):
        engine_args(str(tiny_model), ["--no-such-flag"])


@pytest.mark.parametrize(
    ("asked", "num_prompt_tokens", "granted"), [(50, 10, 50), (500, 10, 90), (None, 10, None), (50, 100, 50)]
)
def test_max_tokens_may_fill_the_context_left_by_the_expanded_prompt(asked, num_prompt_tokens, granted):
    """If nothing is left, vLLM rejects the prompt with its own message."""
    params = SamplingParams(max_tokens=asked, min_tokens=asked or 0)
    clamp(params, tokens_input([1] * num_prompt_tokens), 100)
    assert (params.max_tokens, params.min_tokens) == (granted, granted or 0)


def no_embeddings(config, wanted, **role):
    """Why the engine of this configuration keeps no embeddings; empty if it does."""
    return EngineEmbeddings(config, wanted, arena_directory="/nowhere", **role).reason


def config_of(model, *flags):
    return engine_args(str(model), ["--enforce-eager", *flags]).create_engine_config()


def test_prefix_caching_is_off_only_for_poolers_whose_results_it_would_change(tiny_model):
    for pooling, is_on in (("LAST", True), ("MEAN", False)):
        flags = ("--runner=pooling", f'--pooler-config={{"seq_pooling_type": "{pooling}"}}')
        assert config_of(tiny_model, *flags).cache_config.enable_prefix_caching is is_on


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--runner=pooling"], "pooling requests"),
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
    assert why in no_embeddings(config, "auto")
    assert config.ec_transfer_config is before
    with pytest.raises(StartupFailed, match=why):
        no_embeddings(config, "on")


def test_embeddings_are_kept_where_possible_unless_switched_off(tiny_model):
    config = config_of(tiny_model)
    assert no_embeddings(config, "off") == "--encode-cache off"
    assert config.ec_transfer_config is None
    for wanted in ("auto", "on"):
        assert no_embeddings(config, wanted) == ""
        assert config.ec_transfer_config.is_ec_consumer
        config.ec_transfer_config = None


def encoder_config(model, *flags):
    return engine_args(str(model), ["--enforce-eager", *flags], kv_events=KVEventsConfig(), role="encoder")


def test_encoder_has_no_language_model_and_the_digest_of_the_workers(tiny_model):
    args = encoder_config(tiny_model)
    assert args.kv_events_config is None
    config, worker = args.create_engine_config(), config_of(tiny_model)
    assert no_embeddings(config, "auto", role="encoder") == ""
    assert no_embeddings(worker, "auto") == ""
    config.__post_init__()  # as EngineCore does
    assert (config.is_mm_encoder_only, config.ec_transfer_config.is_encode_only) == (True, True)
    assert (worker.is_mm_encoder_only, worker.ec_transfer_config.is_encode_only) == (False, False)
    assert encoder_digest(config) == encoder_digest(worker)


@pytest.mark.parametrize(
    ("flags", "wanted", "why"),
    [
        ([], "off", "--encode-cache off"),
        (['--limit-mm-per-prompt={"image": 0, "video": 0}'], "auto", "does not support media"),
        (["--pipeline-parallel-size=2"], "auto", "pipeline stages"),
    ],
)
def test_encoder_that_cannot_keep_embeddings_does_not_start(tiny_model, flags, wanted, why):
    config = encoder_config(tiny_model, *flags).create_engine_config()
    with pytest.raises(StartupFailed, match=f"--role encoder is not possible: .*{why}"):
        no_embeddings(config, wanted, role="encoder")


def test_parameters_of_an_encode_request_are_read_by_the_engine():
    params = MsgpackDecoder(SamplingParams).decode(encode_params())
    assert (params.max_tokens, params.detokenize) == (1, False)
    assert params.output_kind is RequestOutputKind.FINAL_ONLY


def test_restored_inputs_are_those_without_a_connector(tiny_model):
    """EngineCore completes its configuration again, which would enable embeddings sent by clients."""
    for flags in ((), ("--enable-mm-embeds",)):
        config = config_of(tiny_model, *flags)
        assert no_embeddings(config, "on") == ""
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


async def measured(*_, **__):
    return [[{"widths": {"image": 8}, "dtypes": {"image": "float32"}, "faults": {}}]]


async def test_encoder_whose_weights_are_replaced_while_it_is_loaded_is_unknown(tiny_model, tmp_path):
    """Otherwise old embeddings would have the digest of the new weights."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    engines = [EngineEmbeddings(config_of(folder), wanted, arena_directory="/nowhere") for wanted in ("auto", "on")]
    with next(folder.glob("*.safetensors")).open("ab") as weights:
        weights.write(b"more")
    await engines[0].learn(measured)
    assert engines[0].card is None
    assert "weights have changed" in engines[0].reason
    with pytest.raises(StartupFailed, match="weights have changed"):
        await engines[1].learn(measured)


async def test_encoders_that_get_the_same_call_last_have_equal_digests_and_new_ones(tiny_model):
    first, second = (EngineEmbeddings(config_of(tiny_model), "auto", arena_directory="/nowhere") for _ in range(2))
    for engine in (first, second):
        await engine.learn(measured)
    assert first.card == second.card == EncoderCard(first.card.digest, "float32", {"image": 8})
    first.renew("of a call that only one of them got")
    assert first.card.digest != second.card.digest
    found = {second.card.digest}
    for salt in ("1", "2"):
        first.renew(salt)
        second.renew(salt)
        assert first.card.digest == second.card.digest
        found.add(first.card.digest)
    assert len(found) == 3
    first.renew("")
    second.renew("")
    assert first.card.digest != second.card.digest
