"""Runs one request: it is admitted, sent to a worker, streamed, and goes on at another worker if its own is lost.

Theory of operation. An *attempt* is one request to one worker, by one hand-over path. While none has given any output,
a request is repeated whole: by the next hand-over path, or at another worker if its own is lost, busy or refuses what
it was sent. The scope of the request holds the media meanwhile.

Once there is output, what the client has had stands (`answer`). Each choice that is not finished goes on as a request
of its own: its prompt is the first one's, with the same media, and behind it the tokens that were delivered. What needs
the lost engine's state cannot go on, and ends with WorkerLost.

A prompt may be computed by another worker than the one that generates (`routing`). Then an attempt begins with one of
its own: the same request is sent to that worker, whose output is what the connector of the other one needs to read its
KV blocks. If it does not succeed, the worker that generates computes the prompt.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from functools import partial
from typing import NamedTuple

import msgspec

from medialane.gateway.admission import OldestFirst, Queues, Ticket
from medialane.gateway.config import GatewayConfig
from medialane.gateway.encoders import Encoders
from medialane.gateway.records import AttemptTrace, EmbeddingOutcome, PrefillOutcome, PrefillReport
from medialane.gateway.request.answer import DeliveredAnswer, DeliveredChoice
from medialane.gateway.request.handover_paths import HandoverPath, Transports, prompt_for
from medialane.gateway.request.prefill import KeptBlocks, Prefilled
from medialane.gateway.request.route import Route, Routes
from medialane.gateway.request.scope import RequestScope, current_scope, while_connected
from medialane.gateway.request.store_items import StoreItems
from medialane.gateway.workers.client import RemoteRequest
from medialane.gateway.workers.link import WorkerLink
from medialane.gateway.workers.pool import WorkerPool, on_hosts_of
from medialane.observability.metrics import Metrics
from medialane.runtime.tasks import merged
from medialane.types.errors import (
    AdapterChanged,
    GenerationFailed,
    HandoverFailed,
    InvalidFeature,
    InvalidRequest,
    MedialaneError,
    MediaLost,
    NoWorkerReady,
    PromptRejected,
    RequestEndsWorkers,
    WorkerBusy,
    WorkerDraining,
    WorkerLost,
)
from medialane.types.feature import MediaPrompt, PlacedFeature, PreparedPrompt
from medialane.types.kv_blocks import BlockIds
from medialane.types.media import StageChoice
from medialane.types.request import Continuable, EngineRequest, ExpandedPrompt, KvTransfer, OutputDelta

logger = logging.getLogger(__name__)

#: What a worker did about embeddings, by mm_hash.
Outcomes = Mapping[str, EmbeddingOutcome]

#: A worker that is lost so soon after a request was sent to it, and has not answered it, may have been ended by it.
SUSPICIOUS_S = 2.0

#: Number of lost workers after which the request is refused.
_NUM_SUSPICIOUS = 2

#: Time before that in which one of them may connect again: then only its connection was cut.
_BACK_S = 2.0

#: Requests that have moved and have no output of their new worker yet, per ready worker: requests of a lost one come
#: all at once, and new requests must not wait behind all of their prefills.
MOVING_PER_WORKER = 16

#: Most seconds that each counts: of an answer that is not streamed, the first output is the last.
_MOVING_S = 1.0

#: Errors of an attempt after which there may be another one.
_REPEATED = (HandoverFailed, InvalidFeature, WorkerLost, WorkerBusy, AdapterChanged)

_MEDIA_LOST = "the media store was lost while this request's media were sent to a worker"


class _Suspect(NamedTuple):
    """A worker that a request may have ended: the run of it, and whether only its engine was lost."""

    link: WorkerLink
    worker_id: str
    is_connected: bool

    @property
    def is_back(self) -> bool:
        return not self.is_connected and self.link.worker_id == self.worker_id


class Call(NamedTuple):
    """A request, its worker, and the paths by which it can still be sent there, best first. Text is part of the request
    message: `prepared` is None, as is its only path.

    `lost` are the names of the workers that were lost with it, in order; it may have ended the `suspects` among them;
    `busy` are workers whose engines had no room for it. `ticket` is from the queue before the engines, if there is
    one. `continuable` is None if its answer, once begun, cannot go on.

    `prefill` is the call of another worker that is to compute the prompt before; once that has, `prefilled` is what it
    has given. If neither is there, the worker computes the prompt itself.
    """

    request: EngineRequest
    prepared: PreparedPrompt | None
    scope: RequestScope
    route: Route
    paths: Sequence[HandoverPath | None]
    continuable: Continuable | None = None
    lost: tuple[str, ...] = ()
    suspects: tuple[_Suspect, ...] = ()
    busy: frozenset[str] = frozenset()
    ticket: Ticket | None = None
    prefill: Call | None = None
    prefilled: Prefilled | None = None


class RequestRunner:
    """Answers the requests of one gateway: chooses workers and hand-over paths, and sends. One event loop."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        transports: Transports,
        store_items: StoreItems,
        workers: WorkerPool,
        routes: Routes,
        metrics: Metrics,
        encoders: Encoders | None,
        queues: Queues | None,
        has_priorities: bool,
        stage_for: Callable[[MediaPrompt], StageChoice],
    ) -> None:
        """With `has_priorities`, engines are scheduled by priority. `stage_for` returns the configured stage of a
        prompt with media."""
        self.workers = workers
        self.routes = routes
        self.metrics = metrics
        self._config = config
        self._transports = transports
        self._store_items = store_items
        self._encoders = encoders
        self._queues = queues
        self._has_priorities = has_priorities
        self._stage_for = stage_for
        self._num_sent = 0
        # A worker has several gateways and clients may choose request ids, so ours contain the gateway and the attempt.
        self._gateway_id = secrets.token_hex(4)
        self.moving = OldestFirst(lambda: MOVING_PER_WORKER * workers.num_ready)

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
            answer, attempts = DeliveredAnswer(), Attempts(self, call)
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
            self.workers.check_ready()
            num_tokens = len(request.prompt.token_ids)
            ticket = await self._queues.engine(scope, num_tokens, has_media=prepared is not None)
        call = self._choose(request, prepared, scope, block_ids=block_ids)
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
        digest = self.workers.encoder
        if not encoders.is_ready(digest):
            return prepared
        new = [placed for placed in prepared.features if placed.feature.embedding is None and placed.feature.tensors]
        if not new or not (hashes := self.routes.new_items(request, prepared, block_ids)):
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
            self.metrics.migrations.labels(error.code, "impossible").inc()
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
            attempts = Attempts(self, call._replace(request=left), lost=error)
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
        is_out = not self.workers.num_ready
        return WorkerLost(error.message, retry_after_s=self.workers.retry_after_s if is_out else error.retry_after_s)

    def _choose(
        self,
        request: EngineRequest,
        prepared: PreparedPrompt | None,
        scope: RequestScope,
        *,
        excluded: frozenset[str] = frozenset(),
        block_ids: dict[int, BlockIds] | None = None,
    ) -> Call:
        """Choose a worker, and the hand-over paths to it in the order of preference; perhaps another one that computes
        the prompt. Raises NoWorkerReady."""
        self.workers.check_ready()
        with scope.timeline.measure("route") as step:
            # Another worker must get all of the prompt expanded.
            may_split = not request.is_pooling and (prepared is None or bool(prepared.features))
            route = self.routes.choose(request, prepared, excluded, block_ids=block_ids, may_split=may_split)
            step.detail = route.routed if scope.trace is not None else None
            scope.defer(route.routed.release)
            call = Call(request, prepared, scope, route, self._paths(route.link, prepared))
            if (prefill := route.prefill) is None:
                self.note_prefill(scope, route.not_split)
                return call
            paths = self._paths(prefill.link, prepared)
            if not all(path is None or path.stage.is_processed for path in (paths[0], call.paths[0])):
                self.note_prefill(scope, "no_path")
                return call
            scope.defer(prefill.routed.release)
            sent = msgspec.structs.replace(request, kv_transfer=KvTransfer("send"))
            return call._replace(prefill=Call(sent, prepared, scope, prefill, paths))

    def note_prefill(self, scope: RequestScope, outcome: PrefillOutcome) -> None:
        """Record whether another worker has computed a prompt, or why not; an empty outcome says nothing."""
        if outcome:
            if outcome != "split":  # which is recorded with its output
                scope.record.prefill = PrefillReport(outcome)
            self.metrics.prefills.labels(outcome).inc()

    def reroute(self, call: Call, excluded: frozenset[str]) -> Call:
        """Return the same call at a worker that is not `excluded`. Raises NoWorkerReady."""
        call.scope.release(call.route.routed.release)
        moved = self._choose(call.request, call.prepared, call.scope, excluded=excluded)
        return call._replace(route=moved.route, paths=moved.paths, prefill=moved.prefill)

    def without_prefill(self, call: Call) -> Call:
        """Return the same call, whose worker computes the prompt. KV blocks that another one keeps for it are released,
        if they are ours: they are for one reader, and it is unknown whether the last attempt was that."""
        if call.prefill is None and call.prefilled is None:
            return call
        if call.prefill is not None:
            call.scope.release(call.prefill.route.routed.release)
        if call.prefilled is not None and call.prefilled.blocks is not None:
            call.scope.release(call.prefilled.blocks.release)
        request = msgspec.structs.replace(call.request, kv_transfer=None)
        return call._replace(request=request, prefill=None, prefilled=None)

    def release_blocks(self, kept_at: Route, release: KvTransfer) -> None:
        """Have a worker that could read KV blocks say that it will not."""
        group = "" if kept_at.client is None else kept_at.client.welcome.card.kv_group
        self._num_sent += 1
        request_id = f"release#{self._gateway_id}-{self._num_sent}"
        request = EngineRequest(request_id, ExpandedPrompt([]), b"", kv_transfer=release)
        for link in self.workers.links.values():
            if link.reads_blocks_of(group):
                with suppress(MedialaneError):
                    link.submit(request)  # its output is of no interest
                    return
        logger.warning("no worker is ready to release KV blocks: they are kept until their lease ends")

    async def elsewhere(self, call: Call, error: WorkerLost) -> Call:
        """Return the call at another worker, after its own is lost: of another host if there is one, since a lost link
        or host costs all workers there, one after the other. If none is ready, wait for one: the lost one may be back
        soon. Raises `error` if none comes in time, or this request has lost enough of them; one that stops as planned
        does not count."""
        link, is_planned = call.route.link, isinstance(error, WorkerDraining)
        gone = (*call.lost, link.name)
        lost = call.lost if is_planned else gone
        call.scope.release(call.route.routed.release)
        if len(lost) > self._config.migration_limit:
            raise error
        give_up_at = time.monotonic() + self._config.migration_timeout_s
        while True:
            addresses = {name: each.address for name, each in self.workers.links.items()}
            is_back = link.client is not None and link.client is not call.route.client
            hosts = gone if is_planned else on_hosts_of(gone, addresses)
            for excluded in (hosts, gone, () if is_back else (link.name,)):
                with suppress(NoWorkerReady):
                    moved = self.reroute(call, frozenset(excluded))
                    logger.warning("%s: %s; sending to another worker", link.name, error.message)
                    return moved._replace(lost=lost, busy=frozenset())
            await self._changed_before(give_up_at, error)

    async def any_ready(self, error: WorkerLost) -> None:
        """Wait until any worker is ready. Raises WorkerLost if none is in time."""
        give_up_at = time.monotonic() + self._config.migration_timeout_s
        while not self.workers.num_ready:
            await self._changed_before(give_up_at, error)

    async def _changed_before(self, give_up_at: float, error: WorkerLost) -> None:
        if not await self.workers.changed_before(give_up_at):
            timeout = f"no worker was ready within {self._config.migration_timeout_s:g} s"
            raise type(error)(f"{error.message}, and {timeout}", retry_after_s=error.retry_after_s) from error

    @while_connected
    async def send(self, call: Call, trace_headers: dict[str, str] | None) -> RemoteRequest:
        """Hand the request over by its first path. Raises HandoverFailed, WorkerLost."""
        request, prepared, route, path = call.request, call.prepared, call.route, call.paths[0]
        timeline = call.scope.timeline
        self._num_sent += 1
        request_id = f"{request.request_id}#{self._gateway_id}-{self._num_sent}"
        prompt, has_passed_holds = request.prompt, False
        if prepared is not None and path is not None:
            if not path.stage.is_processed or path.transport.needs_remote_store:
                # Other requests may be routed while its media are being fetched, or granted to another host.
                self.begin(call, is_sent=False)
            sends_embeddings = path.transport.carries_embeddings and route.link.encoder == self.workers.encoder
            if path.stage.is_processed and not sends_embeddings:
                await self.drop_embeddings(prepared)
            prompt = await prompt_for(
                path, prompt.token_ids, prepared, timeline, encoder_ms_per_token=self.routes.encoder_ms_per_token
            )
            has_passed_holds = path.transport.pass_holds(prompt, route.link, request_id)
        sent = msgspec.structs.replace(
            request,
            request_id=request_id,
            prompt=prompt,
            data_parallel_rank=route.data_parallel_rank,
            has_passed_holds=has_passed_holds,
            trace_headers=trace_headers,
        )
        remote = route.link.submit(sent)
        remote.can_continue = call.continuable is not None and not call.continuable.obstacle
        call.scope.remote = remote
        # A stream that vLLM's app drops without closing is aborted with the scope, not at garbage collection.
        call.scope.defer(remote.abort)
        return remote

    def begin(self, call: Call, *, is_sent: bool = True) -> None:
        self.routes.begin(call.route, call.request.request_id, is_sent=is_sent)
        if call.ticket is not None:
            call.ticket.sent()
        if self._queues is not None:
            self._queues.sent(call.scope)
        call.scope.record.sending(call.route.routed.decision, call.paths[0], is_sent=is_sent)

    @while_connected
    async def drop_embeddings(self, prepared: PreparedPrompt | None) -> bool:
        """Have media that are sent by embeddings made anew, if there are any. Raises what preparing them raises."""
        if prepared is None:
            return False
        try:
            num_items = await prepared.media.without_embeddings()
        except HandoverFailed as error:
            logger.warning("%s: features cannot be sent", error.message)
            return False
        if num_items:
            self.metrics.embeddings.labels("fallback").inc(num_items)
        return num_items > 0

    def handover_error(self, error: MedialaneError, prepared: PreparedPrompt | None) -> MedialaneError:
        """Return the error of a request without further attempts, after the last one's: a failed hand-over is a
        matter of ours."""
        if not isinstance(error, HandoverFailed):
            return error
        if isinstance(error, MediaLost) or (prepared is not None and prepared.media.is_lost):
            return self._store_items.unavailable(_MEDIA_LOST)
        return GenerationFailed("the request's media could not be handed over to a worker")

    def _paths(self, link: WorkerLink, prepared: PreparedPrompt | None) -> Sequence[HandoverPath | None]:
        if prepared is None:
            return (None,)
        paths = self._transports.paths(self._stage_for(prepared.source), link, prepared=bool(prepared.features))
        if not paths and prepared.media.is_lost:  # no descriptor of another arena is sent
            raise self._store_items.unavailable(_MEDIA_LOST)
        if not paths:
            raise NoWorkerReady("no worker supports the configured --stage and --transport (see the log)")
        return paths


class Attempts:
    """The attempts of one request, until one has begun to give output; `call` is the latest one's. If its worker is
    `lost` already, it moves to another one first."""

    def __init__(self, runner: RequestRunner, call: Call, *, lost: WorkerLost | None = None) -> None:
        self.call = call
        self.has_begun = False
        self._runner = runner
        self._lost = lost
        self._sent_at = self._moved_at = 0.0
        self._worker_id = ""
        self._num_counted = 0
        self._end_turn: Callable[[], None] = lambda: None

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        """Stream the output. Raises WorkerLost if the worker is lost in the middle of it, and MedialaneError."""
        try:
            if self._lost is not None:
                self.call = self._runner.without_prefill(self.call)
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
                        raise self._runner.handover_error(error, call.prepared) from error
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
        self._runner.routes.begin(call.route, call.request.request_id, is_sent=False)
        attempt = PrefillAttempt(self._runner, prefill._replace(suspects=call.suspects, ticket=call.ticket))
        try:
            output = await attempt.output()
        except MedialaneError as error:
            if isinstance(error, InvalidRequest) and not isinstance(error, InvalidFeature):
                raise
            logger.warning("%s has not computed a prompt: %s", prefill.route.link.name, error.message)
            self._runner.note_prefill(call.scope, "failed")
            self.call = self._runner.without_prefill(call)._replace(suspects=attempt.call.suspects)
        else:
            self._runner.note_prefill(call.scope, "split")
            prefilled = Prefilled(output, attempt.outcomes, attempt.sent_at, attempt.blocks)
            request = msgspec.structs.replace(call.request, kv_transfer=prefilled.transfer)
            self.call = call._replace(request=request, prefill=None, prefilled=prefilled)
        finally:
            call.scope.release(prefill.route.routed.release)

    async def _send(self, trace: AttemptTrace | None) -> RemoteRequest:
        with self.call.scope.timeline.measure("handover") as step:
            step.detail = trace
            remote = await self._runner.send(self.call, _headers(self.call, trace))
        self._own_blocks(False)
        self._worker_id = self.call.route.link.worker_id
        self._runner.begin(self.call)
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
            self._runner.routes.received(call.route, first)
        if self._lost is not None:
            self._runner.metrics.migration_seconds.observe(first_at - self._moved_at)
            call.route.routed.prefilled(first.num_cached_tokens)
            call.scope.timeline.enter("answer")
            return
        if call.scope.flow is not None and (first.times is not None or not first.finished):
            call.scope.flow.answered(first_at - (self._sent_at if prefilled is None else prefilled.sent_at))
        sent_at = self._sent_at
        if prefilled is None:
            outcomes = self._runner.routes.answered(call.route, call.prepared, first)
        else:
            call.scope.record.transferred(first.num_transferred_tokens)
            first, outcomes = prefilled.as_whole(first, is_about_prompt=False), prefilled.outcomes
            sent_at = prefilled.sent_at
        decision = call.route.routed.decision
        num_tokens, times = call.route.num_prompt_tokens(first), (sent_at, first_at)
        call.scope.record.answered(first, decision, num_tokens, outcomes, times=times)
        for mover in first.movers:
            self._runner.metrics.copied_requests.labels(mover).inc()

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
        self.call = self._runner.without_prefill(self.call)
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
        suspects = (*call.suspects, _Suspect(link, self._worker_id, link.worker_id == self._worker_id))
        give_up_at = time.monotonic() + _BACK_S
        while True:
            suspects = tuple(suspect for suspect in suspects if not suspect.is_back)
            self.call = call._replace(suspects=suspects)
            if len(suspects) < _NUM_SUSPICIOUS:
                return
            may_return = any(not suspect.is_connected for suspect in suspects)
            if not may_return or not await self._runner.workers.changed_before(give_up_at):
                break
        names = " and ".join(suspect.link.name for suspect in suspects)
        logger.error("request %s is refused: %s were lost right after it arrived", call.request.request_id, names)
        self._runner.metrics.migrations.labels(error.code, "refused").inc()
        raise RequestEndsWorkers(f"{_NUM_SUSPICIOUS} workers were lost right after this request arrived") from error

    @while_connected
    async def _move(self, error: WorkerLost, outcome: str) -> None:
        """Wait for a turn, and choose another worker. Raises `error` if there is none."""
        self._moved_at = time.perf_counter()
        self._end_turn()
        try:
            # Before a turn, since there are turns for each ready worker.
            await self._runner.any_ready(error)
            self._end_turn = await self._runner.moving.take(self.call.scope.timeline.started_at)
            self.call = await self._runner.elsewhere(self.call, error)
        except WorkerLost as lost:
            logger.warning("request %s ends: %s", self.call.request.request_id, lost.message)
            self._runner.metrics.migrations.labels(error.code, "failed").inc()
            raise
        asyncio.get_running_loop().call_later(_MOVING_S, self._end_turn)
        self._runner.metrics.migrations.labels(error.code, outcome).inc()
        self._sent_at = 0.0

    def _where_there_is_room(self, error: MedialaneError) -> Call:
        """Choose a worker that has not refused the request for want of room, or of its adapter's version. Raises
        `error` if there is none."""
        busy = self.call.busy | {self.call.route.link.name}
        try:
            return self._runner.reroute(self.call, busy)._replace(busy=busy)
        except NoWorkerReady:
            raise error from None

    async def _by_the_next_path(self, error: HandoverFailed) -> Call:
        call = self.call
        logger.warning("hand-over to %s by %s failed: %s", call.route.link.name, call.paths[0], error.message)
        if await self._runner.drop_embeddings(call.prepared):
            return call  # the same path, with tensors
        if len(call.paths) == 1:
            raise self._runner.handover_error(error, call.prepared) from error
        self._runner.metrics.handover_fallbacks.labels(str(call.paths[0]), error.code).inc()
        return call._replace(paths=call.paths[1:])

    def _without_features(self, error: InvalidFeature) -> Call:
        """Have the worker process the media itself, after it has refused our features. Raises `error` if it would do
        the same: by the request's options, or already."""
        call = self.call
        refused, sources = call.paths[0], [path for path in call.paths if path and not path.stage.is_processed]
        if refused is None or not refused.stage.is_processed or not sources or _has_options(call.prepared):
            raise error
        logger.warning("%s refused %s: %s", call.route.link.name, refused, error.message)
        self._runner.metrics.handover_fallbacks.labels(str(refused), error.code).inc()
        return call._replace(paths=sources)


class PrefillAttempt(Attempts):
    """The attempt to have a worker compute a prompt whose answer another one generates. It has one output. What it did
    about embeddings are `outcomes`."""

    def __init__(self, runner: RequestRunner, call: Call) -> None:
        super().__init__(runner, call)
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
        self.blocks = KeptBlocks(params, partial(self._runner.release_blocks, self.call.route))
        self.call.scope.defer(self.blocks.release)

    def _begin(self, first: OutputDelta) -> None:
        self.has_begun = True
        call = self.call
        self.outcomes = self._runner.routes.answered(call.route, call.prepared, first)
        call.scope.record.prefilled(first, call.route.routed.decision, time.perf_counter() - self._sent_at)
        for mover in first.movers:
            self._runner.metrics.copied_requests.labels(mover).inc()

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
