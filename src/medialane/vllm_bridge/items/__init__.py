"""Media items: processing one, its header, the layout of its placeholders, its options."""

from medialane.vllm_bridge.items.arena_tensors import RESOLVER, ArenaDecoder, ArenaEncoder, ArenaItem, Unreadable
from medialane.vllm_bridge.items.features import (
    decode_item,
    decode_item_without_tensors,
    decode_small_fields,
    encode_item,
    tensor_over,
)
from medialane.vllm_bridge.items.header_values import MALFORMED_FEATURE, NO_OPTIONS, PlaceholderLayouts
from medialane.vllm_bridge.items.mistral_chat import expand_marks, tokenize_without_media, tokenizes_blanks
from medialane.vllm_bridge.items.options import (
    check_model_io,
    check_options,
    check_processor_options,
    check_worker_options,
    final_io,
    item_options,
)
from medialane.vllm_bridge.items.preparation import VllmFrameSampler, VllmProcessor, engine_media
from medialane.vllm_bridge.items.prepared_input import (
    decoder_input,
    engine_input,
    to_vllm_range,
)

__all__ = [
    "MALFORMED_FEATURE",
    "NO_OPTIONS",
    "RESOLVER",
    "ArenaDecoder",
    "ArenaEncoder",
    "ArenaItem",
    "PlaceholderLayouts",
    "Unreadable",
    "VllmFrameSampler",
    "VllmProcessor",
    "check_model_io",
    "check_options",
    "check_processor_options",
    "check_worker_options",
    "decode_item",
    "decode_item_without_tensors",
    "decode_small_fields",
    "decoder_input",
    "encode_item",
    "engine_input",
    "engine_media",
    "expand_marks",
    "final_io",
    "item_options",
    "tensor_over",
    "to_vllm_range",
    "tokenize_without_media",
    "tokenizes_blanks",
]
