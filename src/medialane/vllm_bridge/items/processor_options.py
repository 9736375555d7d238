"""Options that a client may not set in `mm_processor_kwargs`, even if the operator trusts requests with them.

vLLM passes them to Hugging Face's processor together with arguments of its own. Those that specify the input or the
format of the results are not processor options: another value breaks the call or the use of its results. All others
are validated by the processor (`preparation`).

Theory of operation, in a worker. A preparer may run the processor with any option: its memory and time are limited. A
worker has no such limits (stages `decoded` and `url`), so there an option must not make an item take more than the
operator's own options allow. Only the pixel limits of the families that have them are known to: they are counts, and
may be lowered. No other option is harmless because its value is small: a smaller tile, crop or hop makes more tiles
and frames, and an image that is not resized is as large as its file says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from medialane.core.errors import InvalidRequest
from medialane.core.media import Modality

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

    `max_pixels` are the operator's limits (`pixel_limits.max_pixels_of`).
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
