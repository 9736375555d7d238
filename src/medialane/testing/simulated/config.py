"""Settings of simulated workers."""

from __future__ import annotations

import msgspec
from msgspec import field

from medialane.types.errors import StartupFailed
from medialane.types.setting import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check_bounds


class SimulatedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and speed of a simulated worker.

    Defaults are for Qwen2.5-VL 7B in bfloat16 on one GPU with an effective 400 Tflop/s and 2 TB/s: 15 Gflop per prompt
    token, 1 flop in 2.5 fs; 4 patches of a 0.7B vision model per embedding; 400 kflop per token pair of attention;
    15 GB of weights read per step. They are calculated, not measured.
    """

    num_workers: PositiveInt = field(default=1, name="simulated-workers")
    """workers in this process; then {} in --listen is the worker's number"""
    speedup: PositiveFloat = field(default=1.0, name="speedup")
    """simulated seconds per second; below 1 is slower than real time"""
    block_size: PositiveInt = field(default=16, name="simulated-block-size")
    """tokens per KV-cache block"""
    num_kv_blocks: int = field(default=8192, name="simulated-kv-blocks")
    """blocks of the KV cache, including the unused null block"""
    encoder_cache_tokens: PositiveInt = field(default=16384, name="simulated-encoder-cache-tokens")
    """size of the encoder cache, embeddings"""
    max_model_len: PositiveInt = field(default=32768, name="simulated-max-model-len")
    """most tokens of prompt and output"""
    max_num_seqs: PositiveInt = field(default=256, name="simulated-max-num-seqs")
    """most concurrently running requests"""
    max_num_batched_tokens: PositiveInt = field(default=8192, name="simulated-max-num-batched-tokens")
    """most tokens computed in one step"""
    max_queued_reqs: NonNegativeInt = field(default=0, name="simulated-max-num-queued-reqs")
    """as vLLM's --max-num-queued-reqs; 0: no limit"""
    max_queued_tokens: NonNegativeInt = field(default=0, name="simulated-max-num-queued-tokens")
    """as vLLM's --max-num-queued-tokens; 0: no limit"""
    stream_interval: PositiveInt = field(default=1, name="simulated-stream-interval")
    """output tokens sent together, after the first"""
    step_ms: NonNegativeFloat = field(default=8.0, name="simulated-step-ms")
    """fixed time of a step, ms"""
    prefill_token_ms: NonNegativeFloat = field(default=0.04, name="simulated-prefill-token-ms")
    """time per prefilled token, ms"""
    prefill_pair_ns: NonNegativeFloat = field(default=1.0, name="simulated-prefill-pair-ns")
    """attention time per pair of a prefilled and a preceding token, ns"""
    decode_token_ms: NonNegativeFloat = field(default=0.02, name="simulated-decode-token-ms")
    """time per generated token, ms"""
    embedding_ms: NonNegativeFloat = field(default=0.02, name="simulated-embedding-ms")
    """time per encoder embedding, ms"""
    load_ms_per_mib: NonNegativeFloat = field(default=0.1, name="simulated-load-ms-per-mib")
    """time per MiB of embeddings loaded instead of encoded, ms"""
    transfer_token_ms: NonNegativeFloat = field(default=0.003, name="simulated-transfer-token-ms")
    """time until the KV blocks of a prompt token are read from another worker, ms"""
    embedding_bytes: PositiveInt = field(default=7168, name="simulated-embedding-bytes")
    """size of one embedding, bytes"""

    def validate(self) -> None:
        """Raise StartupFailed with the name of an invalid setting."""
        check_bounds(self)
        # Like vLLM at start-up: otherwise a request of this length could never run.
        if (self.num_kv_blocks - 1) * self.block_size < self.max_model_len:
            raise StartupFailed("num_kv_blocks minus one must hold max_model_len tokens")
