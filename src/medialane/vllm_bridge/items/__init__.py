"""Media items: processing one, its header, the layout of its placeholders, its options."""

from medialane.vllm_bridge.items.arena_tensors import RESOLVER, ArenaDecoder, ArenaEncoder, ArenaItem, Unreadable
from medialane.vllm_bridge.items.features import (
    decode_item,
    decode_item_without_tensors,
    decode_small_fields,
    encode_item,
    named_values,
    spec_of,
    tensor_over,
)
from medialane.vllm_bridge.items.header_values import MALFORMED_FEATURE, NO_OPTIONS, decode_options
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
from medialane.vllm_bridge.items.preparation import VllmFrameSampler, VllmProcessor, engine_media
from medialane.vllm_bridge.items.prepared_input import (
    PreparedItems,
    decoder_input,
    engine_input,
    expected_num_tokens,
    note_placed,
    prepared_prompt,
    to_vllm_range,
)

__all__ = [
    "MALFORMED_FEATURE",
    "NO_OPTIONS",
    "RESOLVER",
    "ArenaDecoder",
    "ArenaEncoder",
    "ArenaItem",
    "HashFactors",
    "PreparedItems",
    "Unreadable",
    "VllmFrameSampler",
    "VllmMediaHasher",
    "VllmProcessor",
    "check_model_io",
    "check_options",
    "check_processor_options",
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
    "note_placed",
    "prepared_prompt",
    "spec_of",
    "tensor_over",
    "to_vllm_range",
    "tokenize_without_media",
    "tokenizes_blanks",
]
