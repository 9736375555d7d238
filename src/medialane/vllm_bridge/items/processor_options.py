"""A client's options of the model's processor: `mm_processor_kwargs` of a request, pixel limits of an item.

Options are part of cache keys, are sent to preparers and workers, and reach the model's processor. Those larger than
any processor needs are rejected, in one pass that stops at the first limit (`check_options`, also for
`media_io_kwargs`).

Some options a client may not set, even if the operator trusts requests with them: vLLM passes options to Hugging Face's
processor together with arguments of its own. Those that specify the input or the format of the results are not
processor options: another value breaks the call or the use of its results. All others are validated by the processor
(`preparation`).

Theory of operation, in a worker. A preparer may run the processor with any option: its memory and time are limited. A
worker has no such limits (stages `decoded` and `url`), so there an option must not make an item take more than the
operator's own options allow. Only the pixel limits of the families that have them are known to: they are counts, and
may be lowered. No other option is harmless because its value is small: a smaller tile, crop or hop makes more tiles
and frames, and an image that is not resized is as large as its file says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from medialane.types.errors import InvalidRequest
from medialane.types.hashing import canonical_options
from medialane.types.media import Modality

#: The longest list in practice is a video's `frames_indices`: 768 by default.
MAX_VALUES = 2048
MAX_BYTES = 64 * 1024
MAX_DEPTH = 8

#: Bounds of an integer that is valid in both JSON and msgpack.
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1


def check_options(options: object, param: str) -> None:
    """Raise InvalidRequest naming `param` for options that are too large, too deep, or not JSON."""
    num_values = num_bytes = 0
    todo = [(param, options, 1)]
    while todo:
        path, value, depth = todo.pop()
        num_values += 1
        num_bytes += _bytes_of(value, path)
        num_inside = len(value) if isinstance(value, Mapping | list | tuple) else 0
        if num_inside and depth > MAX_DEPTH:
            raise InvalidRequest(f"the options are nested deeper than {MAX_DEPTH} levels", param=param)
        if num_values + len(todo) + num_inside > MAX_VALUES:
            raise InvalidRequest(f"the options have more than {MAX_VALUES} values", param=param)
        if isinstance(value, Mapping):
            num_bytes += sum(len(key) for key in value if isinstance(key, str))
        if num_bytes > MAX_BYTES:
            raise InvalidRequest(f"the options are larger than {MAX_BYTES} bytes", param=param)
        todo += [(name, inner, depth + 1) for name, inner in _inside(value, path)]


def _inside(value: object, path: str) -> list[tuple[str, object]]:
    """Return the members of an object or list, each with its path for error messages."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequest("the names of options must be strings", param=path)
        return [(f"{path}.{key}", inner) for key, inner in value.items()]
    return [(f"{path}[{n}]", inner) for n, inner in enumerate(value)] if isinstance(value, list | tuple) else []


def _bytes_of(value: object, param: str) -> int:
    """Return the approximate encoded size. Raises InvalidRequest for values that JSON or msgpack cannot represent."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        raise InvalidRequest("the options have an integer of more than 64 bits", param=param)
    if isinstance(value, float) and value - value != 0:  # infinite, or not a number
        raise InvalidRequest("the options have a number that JSON cannot represent", param=param)
    if value is None or isinstance(value, bool | int | float | Mapping | list | tuple):
        return 8
    raise InvalidRequest("the options have a value that JSON cannot represent", param=param)


#: Arguments of `ProcessorMixin.__call__` and of its processors that vLLM 0.32 sets itself or relies on.
_RESERVED = frozenset(
    (
        "text", "images", "image", "videos", "video", "audio", "audios", "data", "conversation", "prompt",
        "return_tensors", "return_dict", "return_row_col_info", "return_metadata", "return_offsets_mapping",
        "return_overflowing_tokens", "return_special_tokens_mask", "input_data_format", "tokenize", "device",
    )
)  # fmt: skip


def check_processor_options(options: Mapping[str, object] | None) -> None:
    """Raise InvalidRequest naming an option that a request may not set, of the processor or one of its components
    (`images_kwargs`)."""
    _check(options or {}, "mm_processor_kwargs")


def _check(options: Mapping[str, object], param: str) -> None:
    for key, value in options.items():
        name = f"{param}.{str(key)[:64]}"
        if key in _RESERVED:
            raise InvalidRequest(f"{key} cannot be set by a request", param=name)
        if isinstance(value, Mapping) and str(key).endswith("_kwargs"):
            _check(value, name)


#: Neither changes the size of an item; vLLM reads the first itself.
_FLAGS = frozenset(("use_audio_in_video", "do_sample_frames"))

#: `size` has these names in families with pixel limits, and counts pixels.
_EDGES = frozenset(("shortest_edge", "longest_edge"))


def check_worker_options(
    options: Mapping[str, object], max_pixels: Mapping[Modality, int], modalities: Iterable[Modality]
) -> None:
    """Raise InvalidRequest naming an option with which items of these modalities may not be processed in a worker.

    `max_pixels` are the operator's limits (`ProcessorProfile.max_pixels`).
    """
    limits = [max_pixels[modality] for modality in modalities if modality in max_pixels]
    most = min(limits, default=0)
    for key, value in options.items():
        if key in _FLAGS and isinstance(value, bool):
            continue
        numbers = _pixel_counts(key, value)
        if not numbers or not limits:
            message = "a worker may not process media with this option; a preparer may (--stage features)"
            raise InvalidRequest(message, param=f"mm_processor_kwargs.{key[:64]}")
        for name, number in numbers.items():
            if type(number) is not int or not 1 <= number <= most:
                message = f"a worker may process media with 1 to {most} pixels only"
                raise InvalidRequest(message, param=f"mm_processor_kwargs.{name}")


def _pixel_counts(key: str, value: object) -> Mapping[str, object]:
    """Return the numbers of pixels in an option, by name; empty for another option."""
    if key in ("min_pixels", "max_pixels"):
        return {key: value}
    if key == "size" and isinstance(value, Mapping) and _EDGES.issuperset(value):
        return {f"{key}.{name}": number for name, number in value.items()}
    return {}


def item_options(item: bytes, max_pixels: int | None, param: str) -> bytes:
    """Return an item's processor options (`MediaRef.options`), as far as the model has them and within `max_pixels`.

    Raises InvalidRequest naming the option.
    """
    if max_pixels is None or item == b"{}":
        return b"{}"
    options = msgspec.json.decode(item, type=dict[str, int])
    if "max_pixels" in options:
        options["max_pixels"] = max_pixels = min(options["max_pixels"], max_pixels)
    if options.get("min_pixels", 0) > max_pixels:
        raise InvalidRequest(f"min_pixels must be at most {max_pixels} for this model", param=f"{param}.min_pixels")
    return canonical_options(options)
