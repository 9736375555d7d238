"""Settings of simulated workers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from medialane.core.errors import StartupFailed


class SimulatedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and speed of a simulated worker.

    Defaults are for Qwen2.5-VL 7B in bfloat16 on one GPU with an effective 400 Tflop/s and 2 TB/s: 15 Gflop per prompt
    token, 1 flop in 2.5 fs; 4 patches of a 0.7B vision model per embedding; 400 kflop per token pair of attention;
    15 GB of weights read per step. They are calculated, not measured.
    """

    num_workers: Annotated[
        int,
        msgspec.Meta(description="workers in this process; with more than one, {} in --listen is the worker's number"),
    ] = 1
    speedup: Annotated[
        float, msgspec.Meta(description="simulated seconds per second; below 1 is slower than real time")
    ] = 1.0
    block_size: Annotated[int, msgspec.Meta(description="tokens per KV-cache block")] = 16
    num_kv_blocks: Annotated[
        int, msgspec.Meta(description="blocks of the KV cache, including the unused null block")
    ] = 8192
    encoder_cache_tokens: Annotated[int, msgspec.Meta(description="size of the encoder cache, embeddings")] = 16384
    max_model_len: Annotated[int, msgspec.Meta(description="most tokens of prompt and output")] = 32768
    max_num_seqs: Annotated[int, msgspec.Meta(description="most concurrently running requests")] = 256
    max_num_batched_tokens: Annotated[int, msgspec.Meta(description="most tokens computed in one step")] = 8192
    max_items: Annotated[int, msgspec.Meta(description="most items of each modality in one prompt")] = 16
    stream_interval: Annotated[int, msgspec.Meta(description="output tokens sent together, after the first")] = 1
    step_ms: Annotated[float, msgspec.Meta(description="fixed time of a step, ms")] = 8.0
    prefill_token_ms: Annotated[float, msgspec.Meta(description="time per prefilled token, ms")] = 0.04
    prefill_pair_ns: Annotated[
        float, msgspec.Meta(description="attention time per pair of a prefilled token and a preceding token, ns")
    ] = 1.0
    decode_token_ms: Annotated[float, msgspec.Meta(description="time per generated token, ms")] = 0.02
    embedding_ms: Annotated[float, msgspec.Meta(description="time per encoder embedding, ms")] = 0.02

    def validate(self) -> None:
        """Raise StartupFailed with the name of an invalid setting."""
        for name in (
            "num_workers",
            "block_size",
            "encoder_cache_tokens",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "stream_interval",
        ):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1")
        _require(self.speedup > 0, "speedup must be positive")
        _require(self.max_items >= 0, "max_items must not be negative")
        for name in ("step_ms", "prefill_token_ms", "prefill_pair_ns", "decode_token_ms", "embedding_ms"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative")
        # Like vLLM at start-up: otherwise a request of this length could never run.
        _require(
            (self.num_kv_blocks - 1) * self.block_size >= self.max_model_len,
            "num_kv_blocks minus one must hold max_model_len tokens",
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise StartupFailed(message)
