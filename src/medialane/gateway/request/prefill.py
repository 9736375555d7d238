"""A prompt that another worker has computed than the one that generates (`Prefilled`).

The worker that has computed it keeps its KV blocks until the other one has read them. Somebody must say so if that does
not happen, or they are kept for the connector's lease (NIXL: 30 s): the scope of the request releases them, unless the
other worker has given output. One that had begun to read them tells the first one itself, then for the second time,
which that ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from medialane.gateway.records import EmbeddingOutcome
from medialane.types.request import KvTransfer, OutputDelta


class Prefilled:
    """`output` is that of the worker that has computed the prompt, `outcomes` are as of `Routes.answered`; it was sent
    there at `sent_at` (perf_counter). `send_release` tells a worker that the blocks will not be read."""

    def __init__(
        self,
        output: OutputDelta,
        outcomes: Mapping[str, EmbeddingOutcome],
        sent_at: float,
        send_release: Callable[[KvTransfer], None],
    ) -> None:
        self.output = output
        self.outcomes = outcomes
        self.sent_at = sent_at
        self._send_release = send_release
        self._is_kept = bool(output.kv_params)

    @property
    def transfer(self) -> KvTransfer:
        """What the worker that generates gets with the request."""
        return KvTransfer("receive", self.output.kv_params)

    def read(self) -> None:
        """The worker that generates has its first token. Idempotent."""
        self._is_kept = False

    def release(self) -> None:
        """Have the blocks released, unless they were read. Idempotent."""
        if self._is_kept:
            self._is_kept = False
            self._send_release(KvTransfer("release", self.output.kv_params))

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
