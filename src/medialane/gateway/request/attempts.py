"""The attempts of one request, until one has begun to give output (`Attempts`).

Theory of operation. An *attempt* is one request to one worker, by one hand-over path. While none has given any output,
a request is repeated whole: by the next hand-over path, or at another worker if its own is lost, busy or refuses what
it was sent. The scope of the request holds the media meanwhile.

If another worker is to compute the prompt (`routing`), an attempt begins with one of its own (`PrefillAttempt`): the
same request is sent to that worker, whose output is what the connector of the other one needs to read its KV blocks. If
it does not succeed, the worker that generates computes the prompt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial

import msgspec

from medialane.gateway.records import AttemptTrace
from medialane.gateway.request.dispatch import Call, Dispatcher, KeptBlocks, Outcomes, Prefilled, Suspect
from medialane.gateway.request.scope import while_connected
from medialane.gateway.workers.client import RemoteRequest
from medialane.types.errors import (
    AdapterChanged,
    GenerationFailed,
    HandoverFailed,
    InvalidFeature,
    InvalidRequest,
    MedialaneError,
    NoWorkerReady,
    RequestEndsWorkers,
    WorkerBusy,
    WorkerLost,
)
from medialane.types.feature import PreparedPrompt
from medialane.types.request import OutputDelta

logger = logging.getLogger(__name__)

#: A worker that is lost so soon after a request was sent to it, and has not answered it, may have been ended by it.
SUSPICIOUS_S = 2.0

#: Number of lost workers after which the request is refused.
_NUM_SUSPICIOUS = 2

#: Time before that in which one of them may connect again: then only its connection was cut.
_BACK_S = 2.0

#: Most seconds that each counts: of an answer that is not streamed, the first output is the last.
_MOVING_S = 1.0

#: Errors of an attempt after which there may be another one.
_REPEATED = (HandoverFailed, InvalidFeature, WorkerLost, WorkerBusy, AdapterChanged)


class Attempts:
    """The attempts of one request, until one has begun to give output; `call` is the latest one's. If its worker is
    `lost` already, it moves to another one first."""

    def __init__(self, dispatcher: Dispatcher, call: Call, *, lost: WorkerLost | None = None) -> None:
        self.call = call
        self.has_begun = False
        self._dispatcher = dispatcher
        self._lost = lost
        self._sent_at = self._moved_at = 0.0
        self._worker_id = ""
        self._num_counted = 0
        self._end_turn: Callable[[], None] = lambda: None

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        """Stream the output. Raises WorkerLost if the worker is lost in the middle of it, and MedialaneError."""
        try:
            if self._lost is not None:
                self.call = self._dispatcher.without_prefill(self.call)
                await self._move(self._lost, "continued")
            while not self.has_begun:
                remote: RemoteRequest | None = None
                try:
                    await self._prefill()
                    with self._traced() as trace:
                        remote = await self._send(trace)
                        async for delta in remote:
                            yield self._noted(delta, trace)
                except MedialaneError as error:
                    if not self.has_begun:  # unless its worker is lost, it has not read them
                        self._own_blocks(not isinstance(error, WorkerLost))
                    if not isinstance(error, _REPEATED):
                        raise
                    call, place = self.call, self.call.route.routed
                    call.scope.record.attempt_failed(place.worker_id, place.rank, call.paths[0], error.code)
                    if self.has_begun:
                        raise self._dispatcher.handover_error(error, call.prepared) from error
                    await self._try_again(error)
                finally:
                    if remote is not None:
                        self.call.scope.release(remote.abort)
        finally:
            self._end_turn()

    def _traced(self) -> AbstractContextManager[AttemptTrace | None]:
        call = self.call
        if call.scope.trace is None:
            return nullcontext()
        return call.scope.trace.attempt(call.request, call.route.link.name, call.paths[0])

    async def _prefill(self) -> None:
        """Have another worker compute the prompt, if that was chosen. If it does not, for whatever reason, the worker
        of this call does, unless the prompt itself is refused."""
        call, prefill = self.call, self.call.prefill
        if prefill is None:
            return
        self._dispatcher.routes.begin(call.route, call.request.request_id, is_sent=False)
        attempt = PrefillAttempt(self._dispatcher, prefill._replace(suspects=call.suspects, ticket=call.ticket))
        try:
            output = await attempt.output()
        except MedialaneError as error:
            if isinstance(error, InvalidRequest) and not isinstance(error, InvalidFeature):
                raise
            logger.warning("%s has not computed a prompt: %s", prefill.route.link.name, error.message)
            self._dispatcher.note_prefill(call.scope, "failed")
            self.call = self._dispatcher.without_prefill(call)._replace(suspects=attempt.call.suspects)
        else:
            self._dispatcher.note_prefill(call.scope, "split")
            prefilled = Prefilled(output, attempt.outcomes, attempt.sent_at, attempt.blocks)
            request = msgspec.structs.replace(call.request, kv_transfer=prefilled.transfer)
            self.call = call._replace(request=request, prefill=None, prefilled=prefilled)
        finally:
            call.scope.release(prefill.route.routed.release)

    async def _send(self, trace: AttemptTrace | None) -> RemoteRequest:
        with self.call.scope.timeline.measure("handover") as step:
            step.detail = trace
            remote = await self._dispatcher.send(self.call, _headers(self.call, trace))
        self._own_blocks(False)
        self._worker_id = self.call.route.link.worker_id
        self._dispatcher.begin(self.call)
        self._sent_at = remote.sent_at
        self.call.scope.record.prompt_sent()
        return remote

    def _own_blocks(self, ours: bool) -> None:
        """KV blocks that another worker keeps for this one are ours to be released, or this one's."""
        if self.call.prefilled is not None and self.call.prefilled.blocks is not None:
            self.call.prefilled.blocks.ours = ours

    def _noted(self, delta: OutputDelta, trace: AttemptTrace | None) -> OutputDelta:
        """Record an output, and return it as the client gets it."""
        call, is_first = self.call, not self.has_begun
        if is_first:
            self._begin(delta)
        self._count(delta)
        if trace is not None:
            trace.note_output(delta)
        if delta.embedded and call.prepared is not None:
            call.prepared.media.note_embedded(delta.embedded)
        if call.prefilled is None:
            return delta
        return call.prefilled.as_whole(delta, is_about_prompt=is_first or call.request.cumulative)

    def _begin(self, first: OutputDelta) -> None:
        """Record the first output. The first one of an answer that goes on is about a prompt of ours, which says
        nothing of the client's."""
        self.has_begun = True
        self._end_turn()
        call = self.call
        first_at = now = time.perf_counter()
        if first.times is not None:
            # The first output of an answer that is not streamed is the whole answer.
            first_at = min(now, max(self._sent_at, now - first.times.decode_s))
        if (prefilled := call.prefilled) is not None:
            self._dispatcher.routes.received(call.route, first)
        if self._lost is not None:
            self._dispatcher.metrics.migration_seconds.observe(first_at - self._moved_at)
            call.route.routed.prefilled(first.num_cached_tokens)
            call.scope.timeline.enter("answer")
            return
        if call.scope.flow is not None and (first.times is not None or not first.finished):
            call.scope.flow.answered(first_at - (self._sent_at if prefilled is None else prefilled.sent_at))
        sent_at = self._sent_at
        if prefilled is None:
            outcomes = self._dispatcher.routes.answered(call.route, call.prepared, first)
        else:
            call.scope.record.transferred(first.num_transferred_tokens)
            first, outcomes = prefilled.as_whole(first, is_about_prompt=False), prefilled.outcomes
            sent_at = prefilled.sent_at
        decision = call.route.routed.decision
        num_tokens, times = call.route.num_prompt_tokens(first), (sent_at, first_at)
        call.scope.record.answered(first, decision, num_tokens, outcomes, times=times)
        for mover in first.movers:
            self._dispatcher.metrics.copied_requests.labels(mover).inc()

    def _count(self, delta: OutputDelta) -> None:
        """Count the tokens of an output; a cumulative one has all so far."""
        num_tokens = 0
        for completion in delta.completions:  # not `sum`: this costs each token of every stream
            num_tokens += len(completion.token_ids)
        self.call.scope.record.generated_tokens += num_tokens - self._num_counted
        self._num_counted = num_tokens if self.call.request.cumulative else 0

    async def _try_again(self, error: MedialaneError) -> None:
        """Decide how the request is sent after an attempt that has failed with `error`, before any output. Raises the
        request's error if nothing is left to try."""
        had_prefilled = self.call.prefilled is not None
        self.call = self._dispatcher.without_prefill(self.call)
        match error:
            case HandoverFailed() if had_prefilled:
                logger.warning("%s did not get a prompt: %s", self.call.route.link.name, error.message)
            case WorkerLost():
                await self._check_innocence(error)
                await self._move(error, "repeated")
            case InvalidFeature():
                self.call = self._without_features(error)
            case HandoverFailed():
                self.call = await self._by_the_next_path(error)
            case _:
                self.call = self._where_there_is_room(error)

    @while_connected
    async def _check_innocence(self, error: WorkerLost) -> None:
        """Raise RequestEndsWorkers if this worker, too, was lost right after it had got this request, and none of them
        was only cut off."""
        call, link = self.call, self.call.route.link
        is_soon = time.perf_counter() - self._sent_at < SUSPICIOUS_S
        if type(error) is not WorkerLost or not self._worker_id or not is_soon:
            return
        suspects = (*call.suspects, Suspect(link, self._worker_id, link.worker_id == self._worker_id))
        give_up_at = time.monotonic() + _BACK_S
        while True:
            suspects = tuple(suspect for suspect in suspects if not suspect.is_back)
            self.call = call._replace(suspects=suspects)
            if len(suspects) < _NUM_SUSPICIOUS:
                return
            may_return = any(not suspect.is_connected for suspect in suspects)
            if not may_return or not await self._dispatcher.workers.changed_before(give_up_at):
                break
        names = " and ".join(suspect.link.name for suspect in suspects)
        logger.error("request %s is refused: %s were lost right after it arrived", call.request.request_id, names)
        self._dispatcher.metrics.migrations.labels(error.code, "refused").inc()
        raise RequestEndsWorkers(f"{_NUM_SUSPICIOUS} workers were lost right after this request arrived") from error

    @while_connected
    async def _move(self, error: WorkerLost, outcome: str) -> None:
        """Wait for a turn, and choose another worker. Raises `error` if there is none."""
        self._moved_at = time.perf_counter()
        self._end_turn()
        try:
            # Before a turn, since there are turns for each ready worker.
            await self._dispatcher.any_ready(error)
            self._end_turn = await self._dispatcher.moving.take(self.call.scope.timeline.started_at)
            self.call = await self._dispatcher.elsewhere(self.call, error)
        except WorkerLost as lost:
            logger.warning("request %s ends: %s", self.call.request.request_id, lost.message)
            self._dispatcher.metrics.migrations.labels(error.code, "failed").inc()
            raise
        asyncio.get_running_loop().call_later(_MOVING_S, self._end_turn)
        self._dispatcher.metrics.migrations.labels(error.code, outcome).inc()
        self._sent_at = 0.0

    def _where_there_is_room(self, error: MedialaneError) -> Call:
        """Choose a worker that has not refused the request for want of room, or of its adapter's version. Raises
        `error` if there is none."""
        busy = self.call.busy | {self.call.route.link.name}
        try:
            return self._dispatcher.reroute(self.call, busy)._replace(busy=busy)
        except NoWorkerReady:
            raise error from None

    async def _by_the_next_path(self, error: HandoverFailed) -> Call:
        call = self.call
        logger.warning("hand-over to %s by %s failed: %s", call.route.link.name, call.paths[0], error.message)
        if await self._dispatcher.drop_embeddings(call.prepared):
            return call  # the same path, with tensors
        if len(call.paths) == 1:
            raise self._dispatcher.handover_error(error, call.prepared) from error
        self._dispatcher.metrics.handover_fallbacks.labels(str(call.paths[0]), error.code).inc()
        return call._replace(paths=call.paths[1:])

    def _without_features(self, error: InvalidFeature) -> Call:
        """Have the worker process the media itself, after it has refused our features. Raises `error` if it would do
        the same: by the request's options, or already."""
        call = self.call
        refused, sources = call.paths[0], [path for path in call.paths if path and not path.stage.is_processed]
        if refused is None or not refused.stage.is_processed or not sources or _has_options(call.prepared):
            raise error
        logger.warning("%s refused %s: %s", call.route.link.name, refused, error.message)
        self._dispatcher.metrics.handover_fallbacks.labels(str(refused), error.code).inc()
        return call._replace(paths=sources)


class PrefillAttempt(Attempts):
    """The attempt to have a worker compute a prompt whose answer another one generates. It has one output. What it did
    about embeddings are `outcomes`."""

    def __init__(self, dispatcher: Dispatcher, call: Call) -> None:
        super().__init__(dispatcher, call)
        self.outcomes: Outcomes = {}
        self.blocks: KeptBlocks | None = None

    @property
    def sent_at(self) -> float:
        return self._sent_at

    async def output(self) -> OutputDelta:
        """Raises MedialaneError."""
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                return delta
        raise GenerationFailed("the worker has computed no prompt")

    async def _send(self, trace: AttemptTrace | None) -> RemoteRequest:
        remote = await super()._send(trace)
        remote.on_kept = self._own
        return remote

    def _own(self, params: bytes) -> None:
        """The scope owns the blocks from now on."""
        self.blocks = KeptBlocks(params, partial(self._dispatcher.release_blocks, self.call.route))
        self.call.scope.defer(self.blocks.release)

    def _begin(self, first: OutputDelta) -> None:
        self.has_begun = True
        call = self.call
        self.outcomes = self._dispatcher.routes.answered(call.route, call.prepared, first)
        call.scope.record.prefilled(first, call.route.routed.decision, time.perf_counter() - self._sent_at)
        for mover in first.movers:
            self._dispatcher.metrics.copied_requests.labels(mover).inc()

    def _noted(self, delta: OutputDelta, trace: AttemptTrace | None) -> OutputDelta:
        """Its token is not delivered, nor is the reason for its end."""
        return super()._noted(delta, None)

    def _count(self, delta: OutputDelta) -> None:
        """Count nothing: its token is none of the answer's."""

    async def _try_again(self, error: MedialaneError) -> None:
        """Only by another path: the other worker can compute the prompt at once."""
        if isinstance(error, WorkerLost):
            await self._check_innocence(error)
        path = self.call.paths[1] if len(self.call.paths) > 1 else None
        if not isinstance(error, HandoverFailed) or path is None or not path.stage.is_processed:
            raise error
        await super()._try_again(error)


def _headers(call: Call, trace: AttemptTrace | None) -> dict[str, str] | None:
    """Return the trace context for the worker: the client's own, unless this process traces the request."""
    if trace is not None:
        return trace.headers
    return call.request.trace_headers if call.scope.trace is None else call.scope.trace.headers


def _has_options(prepared: PreparedPrompt | None) -> bool:
    """Return whether the request has options of the processor, which every stage applies."""
    if prepared is None:
        return False
    return prepared.source.options != b"{}" or any(ref.options != b"{}" for ref in prepared.source.items)
