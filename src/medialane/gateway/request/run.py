"""Runs one request: it is admitted, sent to a worker, streamed, and goes on at another worker if its own is lost.

Until there is any output, it is sent as often as that makes sense (`attempts`). Once there is, what the client has had
stands (`DeliveredAnswer`). Each choice that is not finished goes on as a request of its own: its prompt is the first
one's, with the same media, and behind it the tokens that were delivered. What needs the lost engine's state cannot go
on, and ends with WorkerLost.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from medialane.gateway.admission import Queues
from medialane.gateway.config import GatewayConfig
from medialane.gateway.encoders import Encoders
from medialane.gateway.request.attempts import Attempts
from medialane.gateway.request.dispatch import Call, Dispatcher
from medialane.gateway.request.scope import RequestScope, current_scope
from medialane.runtime.tasks import merged
from medialane.types.errors import MedialaneError, PromptRejected, WorkerLost
from medialane.types.feature import PlacedFeature, PreparedPrompt
from medialane.types.kv_blocks import BlockIds
from medialane.types.request import CompletionDelta, Continuable, EngineRequest, OutputDelta


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


class RequestRunner:
    """Answers the requests of one gateway, on one event loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        config: GatewayConfig,
        encoders: Encoders | None,
        queues: Queues | None,
        has_priorities: bool,
    ) -> None:
        """With `has_priorities`, engines are scheduled by priority."""
        self._dispatcher = dispatcher
        self._config = config
        self._encoders = encoders
        self._queues = queues
        self._has_priorities = has_priorities

    async def generate(
        self, request: EngineRequest, prepared: PreparedPrompt | None, continuable: Continuable | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Generate at the best worker, its media handed over by the first hand-over path that works; at another worker
        if that is lost, where an answer that has begun goes on if it is `continuable`.

        `prepared` is the prompt with its media, None for text. Closing the generator aborts the request at the worker.
        Raises MedialaneError.
        """
        scope = current_scope()
        scope.record.num_running += 1
        try:
            async with scope.connected():
                call = await self._admit(request, prepared, scope, continuable)
            answer, attempts = DeliveredAnswer(), Attempts(self._dispatcher, call)
            try:
                async with aclosing(attempts.deltas()) as deltas:
                    async for delta in deltas:
                        answer.add(delta)
                        yield delta
                scope.record.prompt_answered()
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
            scope.record.prompt_answered()
        except MedialaneError as error:
            # If a worker's vLLM rejected the prompt, the app responds as if its own vLLM had.
            scope.fail(self._for_client(error), app_responds=isinstance(error, PromptRejected))
            raise

    async def _admit(
        self,
        request: EngineRequest,
        prepared: PreparedPrompt | None,
        scope: RequestScope,
        continuable: Continuable | None,
    ) -> Call:
        """Wait until the request may be sent to an engine, and choose a worker. Raises NoWorkerReady,
        QueueFull, QueueTimeout."""
        request = msgspec.structs.replace(request, cache_salt=scope.salt(request.cache_salt))
        block_ids: dict[int, BlockIds] = {}
        if prepared is not None and self._encoders is not None:
            prepared = await self._encoded(request, prepared, self._encoders, scope, block_ids=block_ids)
        if scope.tenant is not None and self._has_priorities:
            request = msgspec.structs.replace(request, priority=scope.tenant.priority(request.priority))
        ticket = None
        if self._queues is not None:
            if scope.preparation is not None:
                scope.preparation.end()
            self._dispatcher.workers.check_ready()
            num_tokens = len(request.prompt.token_ids)
            ticket = await self._queues.engine(scope, num_tokens, has_media=prepared is not None)
        call = self._dispatcher.choose(request, prepared, scope, block_ids=block_ids)
        return call._replace(continuable=continuable, ticket=ticket)

    async def _encoded(
        self,
        request: EngineRequest,
        prepared: PreparedPrompt,
        encoders: Encoders,
        scope: RequestScope,
        *,
        block_ids: dict[int, BlockIds],
    ) -> PreparedPrompt:
        """Have encoders encode the items that no worker has, where that is best; their embeddings are then sent. For
        `block_ids` see `Routes.new_items`."""
        digest = self._dispatcher.workers.encoder
        if not encoders.is_ready(digest):
            return prepared
        new = [placed for placed in prepared.features if placed.feature.embedding is None and placed.feature.tensors]
        if not new or not (hashes := self._dispatcher.routes.new_items(request, prepared, block_ids)):
            return prepared
        new = [placed for placed in new if placed.feature.mm_hash in hashes]
        scope.timeline.enter("encode")
        headers = None if scope.trace is None else scope.trace.headers
        embedded = await encoders.encode(prepared, new, digest, scope.record, trace_headers=headers)
        scope.timeline.enter("parse")
        if not embedded:
            return prepared
        features = await prepared.media.with_embeddings(embedded)
        placed = map(PlacedFeature, features, [placed.placeholder for placed in prepared.features])
        return msgspec.structs.replace(prepared, features=tuple(placed))

    def _parts(
        self, call: Call, answer: DeliveredAnswer, error: WorkerLost
    ) -> Sequence[AsyncGenerator[OutputDelta, None]]:
        """Return the streams of what is left of an answer that has begun. Raises WorkerLost if it cannot go on."""
        continuable = call.continuable
        if continuable is None or continuable.obstacle or not self._config.migration_limit:
            self._dispatcher.metrics.migrations.labels(error.code, "impossible").inc()
            obstacle = continuable.obstacle if continuable is not None else ""
            reason = f", and {obstacle} cannot go on at another one" if obstacle else ""
            raise WorkerLost(f"the worker was lost during generation{reason}") from error
        return [self._rest(call, continuable, choice, error) for choice in answer.unfinished(continuable.num_choices)]

    async def _rest(
        self, call: Call, continuable: Continuable, choice: DeliveredChoice, error: WorkerLost
    ) -> AsyncGenerator[OutputDelta, None]:
        """Stream the rest of one choice from other workers."""
        while not choice.is_finished:
            rest = continuable.rest(choice.index, choice.token_ids, cumulative_logprob=choice.cumulative_logprob)
            left = msgspec.structs.replace(
                call.request, sampling_params=rest.sampling_params, generated=list(choice.token_ids)
            )
            attempts = Attempts(self._dispatcher, call._replace(request=left), lost=error)
            try:
                async with aclosing(attempts.deltas()) as deltas:
                    async for delta in deltas:
                        completions = [rest.restore(completion) for completion in delta.completions]
                        for completion in completions:
                            choice.add(completion)
                        yield msgspec.structs.replace(delta, completions=completions, finished=choice.is_finished)
                        if choice.is_finished:  # by a stop string that the worker does not know
                            return
            except WorkerLost as again:
                if not attempts.has_begun:
                    raise
                call, error = attempts.call, again

    def _for_client(self, error: MedialaneError) -> MedialaneError:
        """Return what the client is told: when to try again, not how a worker was lost."""
        if not isinstance(error, WorkerLost):
            return error
        workers = self._dispatcher.workers
        retry_after_s = error.retry_after_s if workers.num_ready else workers.retry_after_s
        return WorkerLost(error.message, retry_after_s=retry_after_s)
