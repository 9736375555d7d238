"""Media items: processing one, its header, the layout of its placeholders, options, what is learned at start.

`processor_factory` is not imported here: it loads numba, which an engine's processes do not need.
"""

from medialane.vllm_bridge.items.arena_tensors import RESOLVER, ArenaDecoder, ArenaEncoder, ArenaItem, Unreadable
from medialane.vllm_bridge.items.assembler import VllmAssembler
from medialane.vllm_bridge.items.embeds import AcceptedEmbeds, EmbedsReader, try_embeds
from medialane.vllm_bridge.items.features import (
    decode_item,
    decode_item_without_tensors,
    decode_small_fields,
    encode_item,
    named_values,
    spec_of,
    tensor_over,
)
from medialane.vllm_bridge.items.frame_sampler import VllmFrameSampler
from medialane.vllm_bridge.items.header_values import MALFORMED_FEATURE, NO_OPTIONS
from medialane.vllm_bridge.items.media_hash import HashFactors, VllmMediaHasher
from medialane.vllm_bridge.items.mistral_chat import expand_marks, tokenize_without_media, tokenizes_blanks
from medialane.vllm_bridge.items.options import (
    check_model_io,
    check_options,
    check_processor_options,
    final_io,
    item_options,
    model_io,
)
from medialane.vllm_bridge.items.placeholder_layout import decode_options
from medialane.vllm_bridge.items.preparation import VllmProcessor, engine_media
from medialane.vllm_bridge.items.prepared_input import (
    PreparedItems,
    decoder_input,
    engine_input,
    expected_num_tokens,
    note_placed,
    prepared_prompt,
    to_vllm_range,
)
from medialane.vllm_bridge.items.processor_profile import ProcessorProfile, ProfileReport, normalization_of
from medialane.vllm_bridge.items.reference_tensors import Values, compare_fields
from medialane.vllm_bridge.items.sent_tensors import SentTensors, TensorsReader
from medialane.vllm_bridge.items.settings import processor_settings
from medialane.vllm_bridge.items.validation import placeholder_of

__all__ = [
    "MALFORMED_FEATURE",
    "NO_OPTIONS",
    "RESOLVER",
    "AcceptedEmbeds",
    "ArenaDecoder",
    "ArenaEncoder",
    "ArenaItem",
    "EmbedsReader",
    "HashFactors",
    "PreparedItems",
    "ProcessorProfile",
    "ProfileReport",
    "SentTensors",
    "TensorsReader",
    "Unreadable",
    "Values",
    "VllmAssembler",
    "VllmFrameSampler",
    "VllmMediaHasher",
    "VllmProcessor",
    "check_model_io",
    "check_options",
    "check_processor_options",
    "compare_fields",
    "decode_item",
    "decode_item_without_tensors",
    "decode_options",
    "decode_small_fields",
    "decoder_input",
    "encode_item",
    "engine_input",
    "engine_media",
    "expand_marks",
    "expected_num_tokens",
    "final_io",
    "item_options",
    "model_io",
    "named_values",
    "normalization_of",
    "note_placed",
    "placeholder_of",
    "prepared_prompt",
    "processor_settings",
    "spec_of",
    "tensor_over",
    "to_vllm_range",
    "tokenize_without_media",
    "tokenizes_blanks",
    "try_embeds",
]
