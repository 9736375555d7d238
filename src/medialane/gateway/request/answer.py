"""What a client has had of an answer, by choice: from there it goes on if its worker is lost."""

from __future__ import annotations

import msgspec

from medialane.types.request import CompletionDelta, OutputDelta


class DeliveredChoice:
    """One of the completions: the tokens that were delivered, and their log probability."""

    __slots__ = ("cumulative_logprob", "index", "is_finished", "token_ids")

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.cumulative_logprob: float | None = None
        self.is_finished = False

    def add(self, completion: CompletionDelta) -> None:
        self.token_ids += completion.token_ids
        self.cumulative_logprob = completion.cumulative_logprob
        self.is_finished = completion.finish_reason is not None


class DeliveredAnswer:
    """The record of one answer. `add` costs each delta of every stream, so it does no more than it must."""

    def __init__(self) -> None:
        self._choices: dict[int, DeliveredChoice] = {}
        self._first: OutputDelta | None = None

    def add(self, delta: OutputDelta) -> None:
        """Record what is about to be delivered."""
        if self._first is None:
            self._first = delta
        for completion in delta.completions:
            choice = self._choices.get(completion.index)
            if choice is None:
                choice = self._choices[completion.index] = DeliveredChoice(completion.index)
            choice.add(completion)

    def unfinished(self, num_choices: int) -> list[DeliveredChoice]:
        """Return the choices that are not complete, including choices without any delivered output."""
        choices = [self._choices.get(index) or DeliveredChoice(index) for index in range(num_choices)]
        return [choice for choice in choices if not choice.is_finished]

    def continued(self, delta: OutputDelta, *, is_last: bool) -> OutputDelta:
        """Return an output of another worker as one of this answer: about the prompt it says what the first worker has
        said, whose prompt was the client's."""
        first = self._first
        return msgspec.structs.replace(
            delta,
            finished=is_last,
            prompt_token_ids=None,
            prompt_logprobs=None,
            num_cached_tokens=None if first is None else first.num_cached_tokens,
            num_cache_creation_tokens=None if first is None else first.num_cache_creation_tokens,
            placed=(),
        )
