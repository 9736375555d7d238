"""When a worker's engine is asked whether its model accepts embeddings of clients."""

from types import SimpleNamespace

import pytest

from medialane.types.errors import GenerationFailed
from medialane.vllm_bridge.engine.engine_embeddings import accepted_embeds

ACCEPTED = {"fields": ["image_embeds", "image_grid_thw"], "width": 128, "fault": ""}
REFUSED = {"fields": [], "width": 0, "fault": "it asserts that there are none"}


def config(*, is_on=True, takes_media=True):
    media = SimpleNamespace(enable_mm_embeds=is_on)
    return SimpleNamespace(multimodal_config=media, supports_multimodal_inputs=takes_media)


def asked(answer):
    async def ask(name, *, timeout_s):
        assert (name, timeout_s > 60) == ("medialane_try_embeds", True)
        if isinstance(answer, Exception):
            raise answer
        return [[answer]]

    return ask


async def test_model_is_tried_if_clients_may_send_embeddings():
    assert await accepted_embeds(config(), asked(ACCEPTED)) == ACCEPTED


@pytest.mark.parametrize("settings", [{"is_on": False}, {"takes_media": False}])
async def test_model_is_not_tried_otherwise(settings):
    assert await accepted_embeds(config(**settings), asked(AssertionError("tried"))) is None


@pytest.mark.parametrize(
    ("answer", "why"),
    [(GenerationFailed("there is no such utility"), "there is no such utility"), (REFUSED, REFUSED["fault"])],
)
async def test_reason_why_none_are_accepted_is_logged(caplog, answer, why):
    caplog.set_level("WARNING", "medialane")  # a library of vLLM's app raises the level of all
    await accepted_embeds(config(), asked(answer))
    (record,) = caplog.records
    assert why in record.getMessage()
