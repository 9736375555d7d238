"""What `medialane check --tensors` found: each item's fields, compared, and the report that is written as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from medialane.types.media import Modality
from medialane.types.tensor import FieldComparison, PixelNormalisation

#: Whose tensors: plain vLLM's, medialane's, those of Hugging Face's `AutoProcessor`.
Source = Literal["plain", "ours", "hugging_face"]


class TensorTask(msgspec.Struct, frozen=True):
    """What is compared: a model with vLLM's flags; the items whose names contain one of the words `only`, or all."""

    model: str
    vllm_args: tuple[str, ...]
    only: tuple[str, ...] = ()


class ItemTensors(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item. `stage` is the one in which medialane serves such items. `errors` are of those that refuse it; if plain
    vLLM or medialane does, there are no fields."""

    item: str
    modality: Modality
    stage: str
    fields: tuple[FieldComparison, ...] = ()
    errors: dict[Source, str] = {}

    @property
    def is_equal(self) -> bool:
        """Whether medialane gives an engine the very tensors of plain vLLM, or both refuse the item."""
        if self.errors.keys() & {"plain", "ours"}:
            return "plain" in self.errors
        return all(field.of_ours.relation == "equal" for field in self.fields)


class TensorReport(msgspec.Struct, frozen=True, kw_only=True):
    """`hugging_face` is the class of its processor; empty if the model has none, for the reason `no_hugging_face`.
    `normalisation` is what the engine does to raw pixels; None if it gets normalised ones."""

    model: str
    medialane: str
    vllm: str
    transformers: str
    vllm_flags: tuple[str, ...]
    dtype: str
    hugging_face: str
    no_hugging_face: str = ""
    normalisation: PixelNormalisation | None
    items: tuple[ItemTensors, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all items are equal, and plain vLLM has accepted one at all."""
        return all(item.is_equal for item in self.items) and any(item.fields for item in self.items)


def decode(document: bytes) -> TensorReport:
    return msgspec.json.decode(document, type=TensorReport)
