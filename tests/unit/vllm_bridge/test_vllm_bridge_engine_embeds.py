"""When a worker's engine is asked whether its model accepts embeddings of clients."""

from types import SimpleNamespace

import pytest

from medialane.core.errors import GenerationFailed
from medialane.vllm_bridge.engine.engine import VllmEngine

FOUND = {"fields": ["image_embeds", "image_grid_thw"], "width": 128, "fault": ""}


class Engine(VllmEngine):
    """Without an engine: records what it is asked, and what its requests' reader is told."""

    takes_media = True

    def __init__(self, *, is_on, answer=FOUND):
        self._llm = SimpleNamespace(
            model_config=SimpleNamespace(
                multimodal_config=SimpleNamespace(enable_mm_embeds=is_on), runner_type="generate"
            )
        )
        self.asked, self.accepted, self._answer = [], [], answer
        self._reader = SimpleNamespace(accept_embeds=self.accepted.append)
        self._embeddings = SimpleNamespace(learn=self._learned)

    async def _learned(self, _ask):
        pass

    def _renew_card(self):
        pass

    async def _ask(self, name, *_args, timeout_s):
        self.asked.append(name)
        if self._answer is None:
            raise GenerationFailed("there is no such utility")
        return [[self._answer]]


@pytest.mark.parametrize("is_on", [True, False])
async def test_model_is_tried_if_clients_may_send_embeddings(is_on):
    engine = Engine(is_on=is_on)
    await engine.learn_encoder()
    assert (engine.asked, engine.accepted) == ((["medialane_try_embeds"], [FOUND]) if is_on else ([], []))


@pytest.mark.parametrize("answer", [None, {"fields": [], "width": 0, "fault": "it asserts that there are none"}])
async def test_reason_why_none_are_accepted_is_logged(caplog, answer):
    caplog.set_level("WARNING", "medialane")  # a library of vLLM's app raises the level of all
    engine = Engine(is_on=True, answer=answer)
    await engine.learn_encoder()
    (record,) = caplog.records
    assert ("there is no such utility" if answer is None else answer["fault"]) in record.getMessage()
