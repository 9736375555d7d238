"""Whether embeddings can be kept, as measured with a model that stands in for vLLM's."""

from types import SimpleNamespace

import torch
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalFieldElem, MultiModalKwargsItem, PlaceholderRange

from medialane.vllm_bridge.engine.engine_core import measure
from medialane.vllm_bridge.seams.encoder_cache import WorkerEncoder

PLACE = PlaceholderRange(offset=1, length=3)


class Model:
    """Like Qwen3-Omni's thinker: the position of the token after an item is computed with the item's."""

    def get_mrope_input_positions(self, token_ids, features):
        (feature,) = features
        end = feature.mm_position.offset + feature.mm_position.length + 1
        if len(token_ids) < end or int(feature.data["grid"].data) != feature.mm_position.length:
            raise RuntimeError("Position ids length mismatch with input ids length")
        return torch.arange(len(token_ids)).expand(3, -1), 0


class FakeEncoder(WorkerEncoder):
    """Of a worker whose processor and forward pass are replaced by their results."""

    def __init__(self, sample):
        config = SimpleNamespace(model_config=SimpleNamespace(uses_mrope=True))
        super().__init__(SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace(get_model=Model)))
        self._sample = sample

    def sample_inputs(self):
        return {"image": self._sample}

    def embeddings_of(self, _modality, _item):
        return torch.zeros(3, 16)


def test_embeddings_are_kept_of_a_model_that_needs_a_token_after_an_item():
    field = MultiModalFieldConfig.batched("image").field
    item = MultiModalKwargsItem({"grid": MultiModalFieldElem(data=torch.tensor(3), field=field)})
    sample = {"mm_kwargs": {"image": [item]}, "mm_placeholders": {"image": [PLACE]}, "prompt_token_ids": [7, 5, 5, 5]}
    found = measure(None, lambda _: FakeEncoder(sample))
    assert found == {"widths": {"image": 16}, "dtypes": {"image": "float32"}, "faults": {}}
