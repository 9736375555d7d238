"""How an answer that has begun goes on at another worker: what the gateway asks of vLLM's types, which only the bridge
knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from medialane.core.request import CompletionDelta


class RestOfChoice(Protocol):
    """The part of one completion that its worker has not delivered: a request of its own, for one completion.

    Its `sampling_params`, in the engine's encoding, ask for what is left of the original ones, and for no text.
    """

    @property
    def sampling_params(self) -> bytes: ...

    def restore(self, completion: CompletionDelta) -> CompletionDelta:
        """Return what the other worker has sent as the undisturbed answer would have had it: the choice's index, the
        text, the decoded tokens and cumulative log probability. If a stop string is met, the result is the last one and
        says so; the caller aborts the request. To be called for each of its outputs, in order."""
        ...


class Continuable(Protocol):
    """One request's answer, should its worker be lost. Making it costs nothing; using it does."""

    @property
    def obstacle(self) -> str:
        """What of the lost engine's state another worker cannot have, in words for the client ("structured output");
        empty if there is nothing."""
        ...

    @property
    def num_choices(self) -> int:
        """The number of completions that were asked for."""
        ...

    def rest(self, index: int, token_ids: Sequence[int], *, cumulative_logprob: float | None) -> RestOfChoice:
        """Return the rest of the choice with this `index`, of which these tokens, all the text that can be sent of them
        and, if there are log probabilities, their sum were delivered. Takes less than 1 ms, whatever their number."""
        ...
