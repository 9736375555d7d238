"""Processed items that clients send, in vLLM's encoding (`mm_serde`): read strictly, and checked before they are used.

Theory of operation. vLLM's own decoder builds whatever the bytes say, and trusts it: one wrong number ends the engine
with all its requests. Here an item is read as names with tensors, of known dtypes, whose bytes must be as many as their
shape says; nothing is unpickled, and buffers beside the message are refused. What the client says of how a field is
batched is ignored: that follows from the model. Items that equal a feature of ours, byte by byte, are used as that.
Others must be such as the model's processor makes (`check`): only of modalities in which the tensors themselves show
how many embeddings the encoder makes of them, with fields and dimensions as in samples, and small whole numbers that
are bound to the shapes of other fields, or occur in samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.prepare.processor import ProcessedItem
from medialane.types.errors import FeatureUnsupported, InvalidFeature, InvalidRequest
from medialane.types.feature import PlaceholderRange
from medialane.types.media import Modality
from medialane.types.tensor import MAX_TENSORS, Dtype, Shape, TensorSpec
from medialane.vllm_bridge.items.features import MAX_DEPTH, decode_item, encode_item, tensor_over
from medialane.vllm_bridge.items.header_values import MALFORMED_FEATURE, NO_OPTIONS, HeaderWriter, configs_of
from medialane.vllm_bridge.learned.item_shape import whole_numbers
from medialane.vllm_bridge.learned.model_profile import ModelProfile
from medialane.vllm_bridge.seams.scale_out import RAW_VIEW

#: Model families use up to a dozen.
MAX_FIELDS = 64

#: Tensors, numbers and lists of an item, over all fields: nested lists multiply, and a tensor of one byte takes
#: hundreds. A video has a number for each frame.
MAX_VALUES = 16_384

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError)

#: First bytes of msgpack's arrays, strings and extensions.
_ARRAYS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))

_STRINGS = frozenset((*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB))

_EXTENSIONS = frozenset((0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)))


class Elem(msgspec.Struct, forbid_unknown_fields=True):
    """A field as vLLM encodes it. How it is batched, `field`, is not read."""

    data: msgspec.Raw
    field: msgspec.Raw


Fields = Annotated[dict[Annotated[str, msgspec.Meta(max_length=128)], Elem], msgspec.Meta(max_length=MAX_FIELDS)]

Values = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_TENSORS)]

Number = bool | int | float

_fields = msgspec.msgpack.Decoder(Fields).decode

_list = msgspec.msgpack.Decoder(Values).decode

_dtype = msgspec.msgpack.Decoder(Dtype).decode

_shape = msgspec.msgpack.Decoder(Shape).decode

_number: Callable[[msgspec.Raw], Number] = msgspec.msgpack.Decoder(Number).decode


class SentTensors(NamedTuple):
    """A client's item. `sent` is its canonical form, in which equal items have equal headers and bytes."""

    modality: Modality
    item: MultiModalKwargsItem
    sent: tuple[bytes, Any, tuple[memoryview, ...]]

    @property
    def nbytes(self) -> int:
        return sum(len(buffer) for buffer in self.sent[2])


class TensorsReader:
    """Reads and checks the items of one model. Not thread-safe."""

    def __init__(self, profile: ModelProfile) -> None:
        self._processor: BaseMultiModalProcessor = profile.processor
        self._shapes = {m: shape for m, shape in profile.shapes.items() if m not in profile.unfit}
        self._checker = profile.checker
        self._headers = HeaderWriter(profile.processor)
        #: Of a client's media the size is not known. Where tokens depend on it, a prompt does not fit a sample's.
        self._sizes = {modality: made[0].size for modality, made in profile.trial.by_modality.items() if made}

    def read(self, modality: Modality, data: bytes) -> SentTensors:
        """Return an item over `data`, without a copy. Raises InvalidFeature."""
        if (shape := self._shapes.get(modality)) is None:
            raise InvalidFeature(f"this model has no {modality} features")
        try:
            read = _ItemValues().read
            values = {name: read(elem.data) for name, elem in sorted(_fields(data).items())}
        except _UNREADABLE as error:
            raise InvalidFeature("the tensors are not encoded as vLLM encodes them") from error
        if unknown := sorted(values.keys() - shape.fields.keys()):
            raise InvalidFeature(f"{modality}: there is no field {unknown[0][:64]}")
        if odd := [name for name, value in values.items() if not _is_finite(value)]:
            raise InvalidFeature(f"{modality} {odd[0]}: NaN or infinite numbers")
        elems = {n: MultiModalFieldElem(data=v, field=shape.fields[n].kind) for n, v in values.items()}
        item = self._with_own_fields(modality, MultiModalKwargsItem(elems))
        return SentTensors(modality, item, encode_item(item))

    def equals(self, sent: SentTensors, header: bytes, tensors: Sequence[memoryview]) -> bool:
        """Return whether the item equals a feature's, byte by byte."""
        own = decode_item(header, tensors)
        try:
            in_order = MultiModalKwargsItem({name: own[name] for name in sorted(own)})
            header, specs, buffers = encode_item(self._with_own_fields(sent.modality, in_order))
        except InvalidFeature:
            return False
        # By numpy, which releases the GIL: memoryviews are compared with it, 20 ms for the tensors of one image.
        return (header, specs) == sent.sent[:2] and all(
            np.array_equal(np.frombuffer(own, np.uint8), np.frombuffer(given, np.uint8))
            for own, given in zip(buffers, sent.sent[2], strict=True)
        )

    def check(self, sent: SentTensors) -> ProcessedItem:
        """Return the item in the form in which it is stored. Raises InvalidFeature; InvalidRequest for modalities
        whose tensors do not show what the encoder makes of them."""
        modality, item = sent.modality, sent.item
        if self._shapes[modality].measure is None or any(isinstance(elem.data, list) for elem in item.values()):
            message = "tensors of this model are used only if this server has made them: send the media, or a reference"
            raise InvalidRequest(message)
        self._checker.check_item(modality, item)
        self._check_numbers(modality, item)
        try:
            return self._headers.encode(modality, item, self._sizes[modality], NO_OPTIONS)
        except (FeatureUnsupported, *MALFORMED_FEATURE) as error:
            raise InvalidFeature("the model's processor cannot compute placeholders for these tensors") from error

    def check_placed(self, sent: SentTensors, place: PlaceholderRange) -> None:
        """Raise InvalidFeature unless the encoder makes as many embeddings of the item as its placeholder needs."""
        if not self._shapes[sent.modality].accepts(sent.item, place.num_embeds):
            raise InvalidFeature(f"{place.num_embeds} placeholder tokens do not match the number of embeddings")

    def _with_own_fields(self, modality: Modality, item: MultiModalKwargsItem) -> MultiModalKwargsItem:
        try:
            configs = configs_of(self._processor, item, {})
            fields = {name: configs[name].field for name in item}
        except MALFORMED_FEATURE as error:
            raise InvalidFeature(f"{modality}: the fields are not those of an item") from error
        return MultiModalKwargsItem({n: MultiModalFieldElem(data=e.data, field=fields[n]) for n, e in item.items()})

    def _check_numbers(self, modality: Modality, item: MultiModalKwargsItem) -> None:
        """Raise InvalidFeature for whole numbers that nothing bounds: a model may use them as indices."""
        for name, elem in item.items():
            least, greatest = whole_numbers(elem.data)
            expected = self._shapes[modality].fields[name].numbers
            if least > greatest or (expected[0] <= least and greatest <= expected[1]):
                continue
            if self._is_bound(modality, item, name):
                continue
            raise InvalidFeature(f"{modality} {name}: numbers from {least} to {greatest}, which nothing confirms")

    def _is_bound(self, modality: Modality, item: MultiModalKwargsItem, name: str) -> bool:
        """Return whether other numbers in this field would not match the shapes of the others."""
        data = item[name].data
        if not isinstance(data, torch.Tensor):
            return False
        changed = MultiModalFieldElem(data=data + 1, field=item[name].field)
        try:
            self._checker.check_item(modality, MultiModalKwargsItem({**item, name: changed}))
        except InvalidFeature:
            return True
        return False


class _ItemValues:
    """The tensors of one item, which are counted while they are read."""

    def __init__(self) -> None:
        self._num_left = MAX_VALUES

    def read(self, raw: msgspec.Raw, depth: int = 0) -> Any:
        """Return a tensor over its bytes, a number, or a list of them. Raises what is in `_UNREADABLE`."""
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError(f"more than {MAX_VALUES} values")
        first = memoryview(raw)[0]
        if first not in _ARRAYS:
            return _number(raw)
        values = _list(raw)
        if values and memoryview(values[0])[0] in _STRINGS:
            return _tensor(values)
        if depth == MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels")
        return [self.read(value, depth + 1) for value in values]


def _tensor(values: Sequence[msgspec.Raw]) -> torch.Tensor:
    dtype, shape, data = values
    if memoryview(data)[0] not in _EXTENSIONS:
        raise ValueError("a tensor has its bytes in the message")
    spec = TensorSpec(_dtype(dtype), _shape(shape))
    found = msgspec.msgpack.decode(data, ext_hook=_raw_view)
    if spec.dtype == "bool" and np.frombuffer(found, np.uint8).max(initial=0) > 1:
        raise ValueError("a truth value is 0 or 1")
    try:
        return tensor_over(spec, found)
    except InvalidFeature as error:
        raise ValueError(error.message) from error


def _raw_view(code: int, data: memoryview) -> memoryview:
    if code != RAW_VIEW:
        raise ValueError("an extension that is no tensor's bytes")
    return data


def _is_finite(data: Any) -> bool:
    """Return whether no number of a field is NaN or infinite, in any list of it."""
    if isinstance(data, list):
        return all(map(_is_finite, data))
    if isinstance(data, torch.Tensor):
        return not (data.is_floating_point() or data.is_complex()) or bool(torch.isfinite(data).all())
    return math.isfinite(data)
