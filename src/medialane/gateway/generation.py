"""Streams the answer to one request, which goes on at another worker if its own is lost.

Theory of operation. What the client has had stands (`answer`). Each choice that is not finished goes on as a request
of its own: its prompt is the first one's, with the same media, which the request's scope still holds, and behind it the
tokens that were delivered. What needs the lost engine's state cannot go on, and ends with WorkerLost. An answer of
which nothing was delivered is repeated whole instead (`attempts`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from medialane.gateway.answer import Answer, Choice
from medialane.gateway.attempts import Attempts, Call, Sender
from medialane.runtime.tasks import merged
from medialane.types.errors import WorkerLost
from medialane.types.request import Continuable, OutputDelta


class Generation:
    """Answers the requests of one gateway. One event loop."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    async def answer(self, call: Call) -> AsyncGenerator[OutputDelta, None]:
        """Stream the output. Closing it aborts the request. Raises MedialaneError."""
        answer, attempts = Answer(), Attempts(self._sender, call)
        try:
            async with aclosing(attempts.deltas()) as deltas:
                async for delta in deltas:
                    answer.add(delta)
                    yield delta
            return
        except WorkerLost as error:
            if not attempts.has_begun:
                raise
            parts = self._parts(attempts.call, answer, error)
        num_left = len(parts)
        async with aclosing(merged(parts)) as deltas:
            async for delta in deltas:
                num_left -= delta.finished
                yield answer.continued(delta, is_last=not num_left)

    def _parts(self, call: Call, answer: Answer, error: WorkerLost) -> Sequence[AsyncGenerator[OutputDelta, None]]:
        """Return the streams of what is left of an answer that has begun. Raises WorkerLost if it cannot go on."""
        continuable = call.continuable
        if continuable is None or continuable.obstacle or not self._sender.config.migration_limit:
            self._sender.metrics.count_migration(error.code, "impossible")
            obstacle = continuable.obstacle if continuable is not None else ""
            reason = f", and {obstacle} cannot go on at another one" if obstacle else ""
            raise WorkerLost(f"the worker was lost during generation{reason}") from error
        return [self._rest(call, continuable, choice, error) for choice in answer.unfinished(continuable.num_choices)]

    async def _rest(
        self, call: Call, continuable: Continuable, choice: Choice, error: WorkerLost
    ) -> AsyncGenerator[OutputDelta, None]:
        """Stream the rest of one choice from other workers."""
        while not choice.is_finished:
            rest = continuable.rest(choice.index, choice.token_ids, cumulative_logprob=choice.cumulative_logprob)
            left = msgspec.structs.replace(
                call.request, sampling_params=rest.sampling_params, generated=list(choice.token_ids)
            )
            attempts = Attempts(self._sender, call._replace(request=left), lost=error)
            try:
                async with aclosing(attempts.deltas()) as deltas:
                    async for delta in deltas:
                        completions = [rest.restore(completion) for completion in delta.completions]
                        for completion in completions:
                            choice.add(completion)
                        yield msgspec.structs.replace(delta, completions=completions, finished=choice.is_finished)
                        if choice.is_finished:  # by a stop string, of which the worker knows nothing
                            return
            except WorkerLost as again:
                if not attempts.has_begun:
                    raise
                call, error = attempts.call, again
