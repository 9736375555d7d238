"""Processor settings: equal where features mean the same, different where they do not."""

import pytest

from medialane.vllm_bridge.learned import ModelProfile, processor_settings
from vllm_configs import frontend_config


@pytest.fixture(scope="module")
def settings_of(tiny_model):
    from vllm.renderers import renderer_from_config

    def of(*flags):
        config = frontend_config(tiny_model, flags)
        renderer = renderer_from_config(config)
        try:
            return processor_settings(config.model_config, ModelProfile(renderer.get_mm_processor()))
        finally:
            renderer.shutdown()

    return of


@pytest.fixture(scope="module")
def settings(settings_of):
    return settings_of()


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="session")
async def test_gateway_without_weights_and_worker_with_them_agree(vllm_engine, settings):
    assert vllm_engine.card.processor == settings


@pytest.mark.parametrize("flags", [(), ("--dtype=float32", "--max-model-len=1234")], ids=repr)
def test_stores_preparers_and_gateway_agree(tiny_model, settings_of, flags):
    """A gateway refuses a store that processes media otherwise."""
    from huggingface_hub import constants

    from model_parts import preparers_processor

    is_offline = constants.HF_HUB_OFFLINE
    try:
        processor = preparers_processor(tiny_model, *flags)
    finally:
        constants.HF_HUB_OFFLINE = is_offline
    assert processor.settings == settings_of(*flags)


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("--no-mm-device-do-normalize", {"device_normalize"}),
        ("--dtype=float32", {"dtype"}),
        ('--mm-processor-kwargs={"size":{"longest_edge":100352,"shortest_edge":3136}}', {"processor_kwargs"}),
    ],
)
def test_setting_that_changes_features_is_detected(settings_of, settings, flag, names):
    found = settings_of(flag)
    assert {name for name in settings | found if settings.get(name) != found.get(name)} >= names


def test_setting_that_changes_no_feature_is_ignored(settings_of, settings):
    assert settings_of("--max-model-len=1234", "--enforce-eager") == settings


def test_use_of_the_processor_changes_no_setting(renderer):
    """vLLM keeps one Hugging Face processor per process, which may remember what it has computed."""
    processor = renderer.get_mm_processor()
    before = processor_settings(renderer.model_config, ModelProfile(processor))
    processor.info.get_hf_processor().image_processor.remembered = "of an image"
    assert processor_settings(renderer.model_config, ModelProfile(processor)) == before


def test_local_paths_are_not_reported(settings, tiny_model):
    assert str(tiny_model.parent) not in "".join(settings.values())


def test_model_whose_media_are_disabled_is_served_as_a_text_model(tiny_model):
    from medialane.vllm_bridge.frontend import take_frontend

    frontend = take_frontend(str(tiny_model), ["--language-model-only"])
    try:
        assert not frontend.takes_media
        assert "processor" not in frontend.processor_settings
    finally:
        frontend.renderer.shutdown()
