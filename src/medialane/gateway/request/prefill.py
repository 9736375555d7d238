"""A prompt that another worker has computed than the one that generates (`Prefilled`), and its blocks (`KeptBlocks`).

The worker that has computed it keeps the KV blocks until the other one has read them. Somebody must say so if that does
not happen, or they are kept for the connector's lease (NIXL: 30 s). The scope of the request owns them from the message
on that names them, until the request is sent to the other worker, whose engine then says it, also if it aborts the
request. If that worker refuses the request, they are the scope's again.

They are not released if it is lost or hangs: it may still be about to read them, and would keep what has replaced them
in its prefix cache, under the name of this prompt. Its heartbeats extend the lease as long as it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from medialane.gateway.records import EmbeddingOutcome
from medialane.types.request import KvTransfer, OutputDelta


class KeptBlocks:
    """The blocks that these parameters of a connector name; `send_release` tells a worker that they will not be
    read. They are `ours` to be released, or a worker's."""

    def __init__(self, params: bytes, send_release: Callable[[KvTransfer], None]) -> None:
        self.ours = True
        self._params = params
        self._send_release = send_release

    def release(self) -> None:
        """Release them, if they are ours. Idempotent."""
        if self.ours:
            self.ours = False
            self._send_release(KvTransfer("release", self._params))


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
