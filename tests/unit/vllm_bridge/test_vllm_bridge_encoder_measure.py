"""Whether embeddings can be kept, as measured with a model that stands in for vLLM's."""

from types import SimpleNamespace

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalFieldElem, MultiModalKwargsItem, PlaceholderRange

from medialane.vllm_bridge.engine import engine_embeddings as tested

PLACE = PlaceholderRange(offset=1, length=3)


class Model:
    """Like Qwen3-Omni's thinker: the position of the token after an item is computed with the item's."""

    def get_mrope_input_positions(self, token_ids, features):
        (feature,) = features
        end = feature.mm_position.offset + feature.mm_position.length + 1
        if len(token_ids) < end or int(feature.data["grid"].data) != feature.mm_position.length:
            raise RuntimeError("Position ids length mismatch with input ids length")
        return torch.arange(len(token_ids)).expand(3, -1), 0


@pytest.fixture
def worker():
    config = SimpleNamespace(model_config=SimpleNamespace(uses_mrope=True))
    return SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace(get_model=Model))


def test_embeddings_are_kept_of_a_model_that_needs_a_token_after_an_item(worker, monkeypatch):
    field = MultiModalFieldConfig.batched("image").field
    item = MultiModalKwargsItem({"grid": MultiModalFieldElem(data=torch.tensor(3), field=field)})
    sample = {"mm_kwargs": {"image": [item]}, "mm_placeholders": {"image": [PLACE]}, "prompt_token_ids": [7, 5, 5, 5]}
    monkeypatch.setattr(tested, "sample_inputs", lambda _: {"image": sample})
    monkeypatch.setattr(tested, "embeddings_of", lambda *_: torch.zeros(3, 16))
    assert tested.measure(worker) == {"widths": {"image": 16}, "dtypes": {"image": "float32"}, "faults": {}}
