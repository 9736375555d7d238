"""Converts embeddings in a request (base64 of saved tensors, or arrays of numbers) to one `Embeds` document."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from medialane.core.embeds import UNNAMED, Embeds, EmbedsTensor, encode_embeds
from medialane.core.errors import InvalidEmbeds, MedialaneError
from medialane.core.tensor import TensorSpec
from medialane.media.data_url import decode_base64
from medialane.media.saved_tensor import read_tensor

Bytes = bytes | bytearray | memoryview

#: Model families use two or three fields.
MAX_FIELDS = 8
#: Arrays of numbers are used for grids and sizes; embeddings are sent as tensors.
MAX_NUMBERS = 64

_decode_numbers = msgspec.json.Decoder(list[int | float]).decode


def read_embeds(fields: Mapping[str, Bytes | msgspec.Raw], param: str, max_bytes: int) -> bytes:
    """Return the document of one item; a field is base64 of a tensor, or (`msgspec.Raw`) a JSON array of numbers.

    `max_bytes` limits the sum of all base64. Raises InvalidEmbeds, InvalidBase64, MediaTooLarge, EmptyMedia, each
    naming the field.
    """
    if not 0 < len(fields) <= MAX_FIELDS:
        raise InvalidEmbeds(f"embeddings have between 1 and {MAX_FIELDS} fields", param=param)
    tensors: dict[str, EmbedsTensor] = {}
    for name, value in fields.items():
        try:
            tensors[name] = _read_field(value, max_bytes)
        except MedialaneError as error:
            raise error.at(param if name == UNNAMED else f"{param}.{name[:64]}") from error
        max_bytes -= 0 if isinstance(value, msgspec.Raw) else len(value)
    return encode_embeds(Embeds(tensors))


def _read_field(value: Bytes | msgspec.Raw, max_bytes: int) -> EmbedsTensor:
    return _read_numbers(value) if isinstance(value, msgspec.Raw) else read_tensor(decode_base64(value, max_bytes))


def _read_numbers(value: msgspec.Raw) -> EmbedsTensor:
    """Convert an array like vLLM: to int64, or float64 if it contains a float."""
    try:
        numbers = _decode_numbers(value)
        dtype = "float64" if any(isinstance(n, float) for n in numbers) else "int64"
        data = np.array(numbers, dtype).tobytes()
    except (msgspec.DecodeError, OverflowError) as error:
        raise InvalidEmbeds("a field of embeddings must be base64 or an array of numbers") from error
    if not 0 < len(numbers) <= MAX_NUMBERS:
        raise InvalidEmbeds(f"an array of numbers has between 1 and {MAX_NUMBERS}")
    return EmbedsTensor(TensorSpec(dtype, (len(numbers),)), data)  # type: ignore[arg-type]  # one of two literals
