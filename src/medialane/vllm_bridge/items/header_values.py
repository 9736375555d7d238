"""Puts all values into an item's header that prompt assembly and validation read.

Theory of operation. Which fields a family's code reads is not declared anywhere, so it is observed: for each item, the
code that gateway and worker run over its header is run in the preparer. Large tensors are stand-ins there, whose
values cannot be read, so it either succeeds as it will there, or raises; then the item's large fields are added to the
header, smallest first, until it succeeds, and those that turn out not to be needed are removed. In most families no
large field is read; some of audio count the tokens of a clip by its mask. Items of equal header, size and options have
equal outcomes, and are not tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.feature_extraction_utils import BatchFeature
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.prepare.processor import ProcessedItem
from medialane.types.errors import FeatureUnsupported
from medialane.types.feature import MAX_HEADER_BYTES, MediaPayload
from medialane.types.media import MediaSize, Modality
from medialane.vllm_bridge.items.features import INLINE_BYTES, decode_item_without_tensors, encode_item
from medialane.vllm_bridge.items.placeholder_layout import PlaceholderLayouts, decode_options, layout_of
from medialane.vllm_bridge.seams.multimodal import fields_config

#: The options of a request that has none.
NO_OPTIONS = b"{}"

#: Raised by a family's code for inconsistent fields, for values that are unknown, or for options that it rejects.
MALFORMED_FEATURE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    AssertionError,
    ArithmeticError,
    UnboundLocalError,  # MiniCPM-V 4.6 without `do_resize`
    StrictDataclassError,  # an option of the wrong type, where vLLM calls an image processor itself
)


class HeaderWriter:
    """Encodes the items of one processor. Not thread-safe."""

    def __init__(self, processor: BaseMultiModalProcessor) -> None:
        self._processor = processor
        self._layouts = PlaceholderLayouts(processor)

    def encode(self, modality: Modality, item: MultiModalKwargsItem, size: MediaSize, options: bytes) -> ProcessedItem:
        """Return the item in the form in which it is sent.

        Raises FeatureUnsupported if a value that has to be in the header cannot be there.
        """
        header, specs, buffers = encode_item(item)
        if not specs or not self._failures(modality, header, size, options):
            return ProcessedItem(header=header, specs=specs, buffers=buffers, size=size)
        return self._with_values(modality, item, size, options)

    def _with_values(
        self, modality: Modality, item: MultiModalKwargsItem, size: MediaSize, options: bytes
    ) -> ProcessedItem:
        # An item that fails with all its values (a clip that is too short) is to fail with the same error later.
        expected = self._failures_of_whole(modality, item, size, options)

        def suffices(inline: Sequence[str]) -> bool:
            header = encode_item(item, inline)[0]
            fits = len(header) <= MAX_HEADER_BYTES
            return fits and self._failures(modality, header, size, options) == expected

        sizes = {name: _num_bytes(elem.data) for name, elem in item.items()}
        large = sorted((name for name in item if sizes[name] > INLINE_BYTES), key=sizes.__getitem__)
        inline = next((large[:count] for count in range(len(large) + 1) if suffices(large[:count])), None)
        if inline is None:
            raise FeatureUnsupported(f"the prompt depends on values of this {modality} that are too large for a header")
        for name in inline[:-1]:  # the last is needed
            without = [other for other in inline if other != name]
            inline = without if suffices(without) else inline
        header, specs, buffers = encode_item(item, inline)
        return ProcessedItem(header=header, specs=specs, buffers=buffers, size=size)

    def _failures(self, modality: Modality, header: bytes, size: MediaSize, options: bytes) -> list[str]:
        """Return the errors of assembly and validation with this header."""
        payload = MediaPayload(modality, "", header, (), size)

        def run(given: bytes) -> None:
            self._layouts.find([payload], given, check=lambda: self._split(decode_item_without_tensors(header), given))

        return _errors_of(run, options)

    def _failures_of_whole(
        self, modality: Modality, item: MultiModalKwargsItem, size: MediaSize, options: bytes
    ) -> list[str]:
        payload = MediaPayload(modality, "", b"", (), size)

        def run(given: bytes) -> None:
            self._split(item, given)
            layout_of(self._processor, [payload], [item], given)

        return _errors_of(run, options)

    def _split(self, item: MultiModalKwargsItem, options: bytes) -> None:
        configs_of(self._processor, item, decode_options(options))


def _errors_of(run: Callable[[bytes], None], options: bytes) -> list[str]:
    """Run with the request's options and, as validation does, without."""
    errors = []
    for given in dict.fromkeys((options, NO_OPTIONS)):
        try:
            run(given)
        except MALFORMED_FEATURE as error:
            errors.append(repr(error))
    return errors


def configs_of(
    processor: BaseMultiModalProcessor, item: MultiModalKwargsItem, kwargs: Mapping[str, object]
) -> Mapping[str, Any]:
    """Return how the processor splits the fields of a batch that has only this item."""
    batch = BatchFeature({name: _as_batch(elem) for name, elem in item.items()})
    return fields_config(processor, batch, kwargs)


def _as_batch(elem: MultiModalFieldElem) -> Any:
    """Return the field as the Hugging Face processor returns it for a request with this single item."""
    if isinstance(elem.field, MultiModalBatchedField):
        return elem.data.unsqueeze(0) if isinstance(elem.data, torch.Tensor) else [elem.data]
    return elem.data


def _num_bytes(data: Any) -> int:
    if isinstance(data, torch.Tensor):
        return int(data.nbytes)
    return sum(map(_num_bytes, data)) if isinstance(data, list | tuple) else 0
