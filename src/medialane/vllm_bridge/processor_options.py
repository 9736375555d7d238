"""What a client may not say in `mm_processor_kwargs`, whoever trusts its requests with them.

vLLM hands them to Hugging Face's processor together with arguments of its own. Those that say what is processed, or in
which form the results come, are no options of a processor: with another value the call, or whoever takes its results,
breaks. All others are the processor's to judge (`preparation`).
"""

from __future__ import annotations

from collections.abc import Mapping

from medialane.core.errors import InvalidRequest

#: Arguments of `ProcessorMixin.__call__` and of the processors behind it that vLLM 0.32 gives itself or relies on.
_RESERVED = frozenset(
    (
        "text", "images", "image", "videos", "video", "audio", "audios", "data", "conversation", "prompt",
        "return_tensors", "return_dict", "return_row_col_info", "return_metadata", "return_offsets_mapping",
        "return_overflowing_tokens", "return_special_tokens_mask", "input_data_format", "tokenize", "device",
    )
)  # fmt: skip


def check_processor_options(options: Mapping[str, object] | None) -> None:
    """Raise InvalidRequest naming the option that a request may not set, of the processor or of one of its parts
    (`images_kwargs`)."""
    _check(options or {}, "mm_processor_kwargs")


def _check(options: Mapping[str, object], param: str) -> None:
    for key, value in options.items():
        name = f"{param}.{str(key)[:64]}"
        if key in _RESERVED:
            raise InvalidRequest(f"{key} cannot be set by a request", param=name)
        if isinstance(value, Mapping) and str(key).endswith("_kwargs"):
            _check(value, name)
