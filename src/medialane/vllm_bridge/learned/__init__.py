"""What is learned of a model at start, one `ModelProfile` for a process, and what is made with it: prompts, validation.

`processor_factory` is not imported here: it loads numba, which an engine's processes do not need.
"""

from medialane.vllm_bridge.learned.assembler import VllmAssembler
from medialane.vllm_bridge.learned.model_profile import ModelProfile, ProfileReport, normalization_of
from medialane.vllm_bridge.learned.reference_tensors import compare_fields
from medialane.vllm_bridge.learned.sent_tensors import TensorsReader
from medialane.vllm_bridge.learned.settings import describe, processor_settings
from medialane.vllm_bridge.learned.validation import placeholder_of

__all__ = [
    "ModelProfile",
    "ProfileReport",
    "TensorsReader",
    "VllmAssembler",
    "compare_fields",
    "describe",
    "normalization_of",
    "placeholder_of",
    "processor_settings",
]
