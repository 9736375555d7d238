"""A prompt that another worker has computed than the one that generates (`Prefilled`), and its KV blocks (`KeptBlocks`).

The worker that has computed it keeps the blocks until the other one has read them. Somebody must say so if that does
not happen, or they are kept for the connector's lease (NIXL: 30 s). So the scope of the request owns them from the
message on that names them, and releases them unless the other worker has given output. One that had begun to read them
then tells the first one for the second time, which ignores that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from medialane.gateway.records import EmbeddingOutcome
from medialane.types.request import KvTransfer, OutputDelta


class KeptBlocks:
    """The blocks that these parameters of a connector name; `send_release` tells a worker that they will not be
    read."""

    def __init__(self, params: bytes, send_release: Callable[[KvTransfer], None]) -> None:
        self.params = params
        self._send_release = send_release
        self._is_kept = True

    def read(self) -> None:
        """The worker that generates has its first token. Idempotent."""
        self._is_kept = False

    def release(self) -> None:
        """Idempotent; no effect if they were read."""
        if self._is_kept:
            self._is_kept = False
            self._send_release(KvTransfer("release", self.params))


class Prefilled(NamedTuple):
    """The `output` of the worker that has computed the prompt, to which that was sent at `sent_at` (perf_counter);
    `outcomes` are as of `Routes.answered`, `blocks` None if the connector finds them by the prompt."""

    output: OutputDelta
    outcomes: Mapping[str, EmbeddingOutcome]
    sent_at: float
    blocks: KeptBlocks | None

    @property
    def transfer(self) -> KvTransfer:
        """What the worker that generates gets with the request."""
        return KvTransfer("receive", self.output.kv_params)

    def as_whole(self, delta: OutputDelta, *, is_about_prompt: bool) -> OutputDelta:
        """Return an output of the worker that generates as if it had computed the prompt, too: the tokens that were
        cached, and with the first output, or with each that has everything so far, the log probabilities."""
        output = self.output
        return msgspec.structs.replace(
            delta,
            num_cached_tokens=output.num_cached_tokens,
            num_cache_creation_tokens=output.num_cache_creation_tokens,
            prompt_logprobs=output.prompt_logprobs if is_about_prompt else None,
        )
