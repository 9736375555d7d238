"""Options that a client may not set in `mm_processor_kwargs`, even if the operator trusts requests with them.

vLLM passes them to Hugging Face's processor together with arguments of its own. Those that specify the input or the
format of the results are not processor options: another value breaks the call or the use of its results. All others
are validated by the processor (`preparation`).
"""

from __future__ import annotations

from collections.abc import Mapping

from medialane.core.errors import InvalidRequest

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
