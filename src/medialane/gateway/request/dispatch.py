"""How a request is sent to a worker: chosen with the hand-over paths to it (`Call`), and sent by one (`Dispatcher`).

A prompt may be computed by another worker than the one that generates. That worker keeps the KV blocks (`KeptBlocks`)
until the other one has read them. Somebody must say so if that does not happen, or they are kept for the connector's
lease (NIXL: 30 s). The scope of the request owns them from the message on that names them, until the request is sent to
the other worker, whose engine then says it, also if it aborts the request. If that worker refuses the request, they are
the scope's again.

They are not released if it is lost or hangs: it may still be about to read them, and would keep what has replaced them
in its prefix cache, under the name of this prompt. Its heartbeats extend the lease as long as it lives.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from medialane.gateway.admission import OldestFirst, Queues, Ticket
from medialane.gateway.config import GatewayConfig
from medialane.gateway.records import EmbeddingOutcome, PrefillOutcome, PrefillReport
from medialane.gateway.request.handover_paths import HandoverPath, Transports, described, prompt_for
from medialane.gateway.request.route import Route, Routes
from medialane.gateway.request.scope import RequestScope, while_connected
from medialane.gateway.request.store_items import StoreItems
from medialane.gateway.workers.client import RemoteRequest
from medialane.gateway.workers.link import WorkerLink
from medialane.gateway.workers.pool import WorkerPool, on_hosts_of
from medialane.observability.metrics import Metrics
from medialane.types.errors import (
    GenerationFailed,
    HandoverFailed,
    MedialaneError,
    MediaLost,
    NoWorkerReady,
    WorkerDraining,
    WorkerLost,
)
from medialane.types.feature import MediaPrompt, PreparedPrompt
from medialane.types.kv_blocks import BlockIds
from medialane.types.media import StageChoice
from medialane.types.request import Continuable, EngineRequest, ExpandedPrompt, KvTransfer, OutputDelta

logger = logging.getLogger(__name__)

#: What a worker did about embeddings, by mm_hash.
Outcomes = Mapping[str, EmbeddingOutcome]

#: Requests that have moved and have no output of their new worker yet, per ready worker: requests of a lost one come
#: all at once, and new requests must not wait behind all of their prefills.
MOVING_PER_WORKER = 16

_MEDIA_LOST = "the media store was lost while this request's media were sent to a worker"


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
    outcomes: Outcomes
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


class Suspect(NamedTuple):
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
    suspects: tuple[Suspect, ...] = ()
    busy: frozenset[str] = frozenset()
    ticket: Ticket | None = None
    prefill: Call | None = None
    prefilled: Prefilled | None = None


class Dispatcher:
    """Chooses workers and hand-over paths for the requests of one gateway, and sends them. `stage_for` returns the
    configured stage of a prompt with media."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        transports: Transports,
        store_items: StoreItems,
        workers: WorkerPool,
        routes: Routes,
        metrics: Metrics,
        queues: Queues | None,
        stage_for: Callable[[MediaPrompt], StageChoice],
    ) -> None:
        self.workers = workers
        self.routes = routes
        self.metrics = metrics
        self._config = config
        self._transports = transports
        self._store_items = store_items
        self._queues = queues
        self._stage_for = stage_for
        self._num_sent = 0
        # A worker has several gateways and clients may choose request ids, so ours contain the gateway and the attempt.
        self._gateway_id = secrets.token_hex(4)
        self.moving = OldestFirst(lambda: MOVING_PER_WORKER * workers.num_ready)

    def choose(
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
        moved = self.choose(call.request, call.prepared, call.scope, excluded=excluded)
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
        prompt, has_passed_holds, without_media = request.prompt, False, self._needs_no_media(call)
        if prepared is not None and without_media:
            prompt = described(prompt.token_ids, prepared)
        elif prepared is not None and path is not None:
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
            without_media=without_media,
            trace_headers=trace_headers,
        )
        remote = route.link.submit(sent)
        remote.can_continue = call.continuable is not None and not call.continuable.obstacle
        call.scope.remote = remote
        # A stream that vLLM's app drops without closing is aborted with the scope, not at garbage collection.
        call.scope.defer(remote.abort)
        return remote

    def _needs_no_media(self, call: Call) -> bool:
        """Whether a worker of another host, which reads the KV blocks of the prompt, gets the request without its
        media. Its engine fails it if it must compute an item again: then it is sent with them, or goes on elsewhere."""
        path, card, rest = call.paths[0], call.route.link.encoder_card, call.continuable
        if call.prefilled is None or call.prepared is None or path is None or card is None or rest is None:
            return False
        can_go_on = rest.num_choices == 1 and not rest.obstacle and self._config.migration_limit > 0
        is_known = all(placed.feature.modality in card.widths for placed in call.prepared.features)
        return path.transport.needs_remote_store and can_go_on and is_known

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
