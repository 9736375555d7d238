"""Gateways and simulated workers in virtual time, in one process.

What is real: the engines' schedulers and caches, the workers' batches of KV events, the reports of each worker to each
gateway, the announcements of requests between gateways (`worker.reports`,
`gateway.workers.reports`), and each gateway's router (`gateway.request.route`). Connections are replaced by a delay,
computation by `step_s`. Time is that of the event loop, which skips idle times: a run does not depend on the machine's
load and is deterministic.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from prometheus_client import CollectorRegistry

from medialane.gateway import PromptPrefix, Route, Routes, WorkerPool
from medialane.observability import Metrics
from medialane.routing import RoutedRequest, Router, RoutingConfig, RoutingRequest
from medialane.testing.fake_worker import FakeLink
from medialane.testing.simulated import SimulatedConfig
from medialane.testing.simulated.engine import simulated_card, simulated_scheduler, step_s
from medialane.testing.simulated.scheduler import SimulatedStep
from medialane.testing.simulated.sequence import SimulatedItem, SimulatedSequence
from medialane.types.feature import PlaceholderRange
from medialane.types.kv_blocks import KvChange, KvEventBatch, prompt_block_ids
from medialane.types.request import ModelCard, WorkerLoad, WorkerRole
from medialane.wire import FrameReader, RpcConfig, decode_from_worker
from medialane.worker.block_table import BlockReports
from medialane.worker.reports import PendingWorkRelay, SessionReports
from simulated_hosts import Host, num_bytes
from simulated_media import MediaPath
from traces import Turn
from traffic_meter import TrafficMeter
from virtual_time import VirtualTimeLoop

#: A 7B model's KV cache on a GPU of 80 GB: 57 kB a token, 55 GB.
CONFIG = SimulatedConfig(num_kv_blocks=60_000)
#: One way between gateway and worker. The unix socket takes a tenth; the rest is the event loops at both ends.
HOP_S = 0.001
#: Requests before caches and queues have reached a steady state are not counted: this share of the trace.
WARM_UP = 0.4
_RPC = RpcConfig()
#: How requests are spread over gateways: each request is a connection of its own, or each session has one.
Spread = Literal["requests", "sessions"]


@dataclass
class Outcome:
    """The result of one run. `gaps_s` are the times between tokens of a response. `num_embeds` are those of all
    prompts' items, `num_needed` of the items that the KV cache does not cover."""

    ttft_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0
    num_embeds: int = 0
    num_needed: int = 0
    num_encoded: int = 0
    gaps_s: list[float] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)
    began_s: float = 0.0
    last_arrival_s: float = 0.0
    last_end_s: float = 0.0

    @property
    def cached(self) -> float:
        return self.num_cached / self.num_tokens

    @property
    def encoder_hits(self) -> float:
        return 1 - self.num_encoded / self.num_needed

    @property
    def not_encoded(self) -> float:
        """Embeddings that either cache saved."""
        return 1 - self.num_encoded / self.num_embeds

    @property
    def utilisation(self) -> float:
        return sum(self.work_s) / len(self.work_s) / (self.last_arrival_s - self.began_s)

    @property
    def imbalance(self) -> float:
        return max(self.work_s) * len(self.work_s) / sum(self.work_s)


class SimulatedCluster:
    """Gateways with a router each, and workers. `seed` selects the gateways of requests; `media` is where items are
    encoded on each host; workers and gateways are distributed over hosts in turn. `roles` are the workers', all of them
    `worker` if there are none."""

    def __init__(
        self,
        num_workers: int,
        config: RoutingConfig,
        *,
        simulated: SimulatedConfig = CONFIG,
        num_gateways: int = 1,
        spread: Spread = "requests",
        hop_s: float = HOP_S,
        seed: int = 1,
        meter: TrafficMeter | None = None,
        media: MediaPath | Sequence[MediaPath] | None = None,
        roles: Sequence[WorkerRole] = (),
    ) -> None:
        self.loop = VirtualTimeLoop()
        self.hosts = [Host(path) for path in (media if isinstance(media, Sequence) else [media])]
        self.outcome = Outcome(work_s=[0.0] * num_workers)
        self.simulated = simulated
        self.hop_s = hop_s
        self.num_unfinished = 0
        self.meter = meter
        self._spread = spread
        self._next_turns: dict[str, Iterator[Turn]] = {}
        self._random = random.Random(seed)
        of_workers: Sequence[WorkerRole] = roles or ["worker" for _ in range(num_workers)]
        cards = [simulated_card(simulated, "m", role) for role in of_workers]
        self.workers = [_Worker(self, number, card) for number, card in enumerate(cards)]
        self.gateways = [_Gateway(self, config, number, seed + number) for number in range(num_gateways)]

    def run(self, turns: list[Turn]) -> Outcome:
        self.outcome.began_s, self.outcome.last_arrival_s = counted(turns)[0].time_s, turns[-1].time_s
        self.num_unfinished = len(turns)
        self.loop.call_soon(self._connect)
        self._arrive_next(iter(turns), {})
        self._run()
        return self.outcome

    def _arrive_next(self, turns: Iterator[Turn], gateways: dict[str, _Gateway]) -> None:
        """Let a turn arrive at its time, then the next one: so few timers wait that the loop must sort."""
        if (turn := next(turns, None)) is None:
            return
        drawn = self._random.choice(self.gateways)
        gateway = drawn if self._spread == "requests" else gateways.setdefault(turn.session, drawn)
        self.loop.call_at(turn.time_s, gateway.arrive, turn)
        self.loop.call_at(turn.time_s, self._arrive_next, turns, gateways)

    def run_users(self, users: Mapping[str, Sequence[Turn]]) -> Outcome:
        """Run sessions whose turns follow each other at once, from their times on, with the first gateway. Returns when
        all are done."""
        self.num_unfinished = sum(map(len, users.values()))
        self.outcome.last_arrival_s = math.inf
        self._next_turns = {name: iter(turns) for name, turns in users.items()}
        for name, turns in users.items():
            self.loop.call_at(turns[0].time_s, self.finished, name)
        self.loop.call_soon(self._connect)
        self._run()
        self.outcome.last_arrival_s = self.loop.time()
        return self.outcome

    def _run(self) -> None:
        """Until nothing is to be done. Of the many objects almost none are cyclic garbage: looking for it takes a sixth
        of the time."""
        gc.disable()
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()
            gc.enable()

    def finished(self, session: str) -> None:
        turn = next(self._next_turns.get(session, iter(())), None)
        if turn is not None:
            self.gateways[0].arrive(turn)

    def _connect(self) -> None:
        for gateway in self.gateways:
            for worker in self.workers:
                gateway.connect(worker)

    def host(self, number: int) -> Host:
        """Return the host of the worker or gateway with this number."""
        return self.hosts[number % len(self.hosts)]

    def counts(self, time_s: float) -> bool:
        return self.outcome.began_s <= time_s <= self.outcome.last_arrival_s


class _Wire:
    """One direction of a connection: what is sent arrives in order, one hop later."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._waiting: deque[Callable[[], object]] = deque()

    def send(self, action: Callable[[], object]) -> None:
        self._waiting.append(action)  # a heap of timers does not keep the order of equal times
        self._cluster.loop.call_later(self._cluster.hop_s, self._deliver)

    def _deliver(self) -> None:
        self._waiting.popleft()()


class _Connection:
    """What `SessionReports` uses of `wire.Connection`; `receive` gets its messages at the gateway."""

    paused = False

    def __init__(self, wire: _Wire, receive: Callable[[Any], object]) -> None:
        self.closed = asyncio.Event()
        self._wire = wire
        self._receive = receive

    def send(self, message: object) -> None:
        self._wire.send(lambda: self._receive(message))

    def send_in_pieces(self, source: Any) -> None:
        goes_on, frames = True, FrameReader(_RPC.max_frame_bytes)
        while goes_on:
            buffer = bytearray()
            goes_on = source.append_next(buffer)
            frames.receive(bytes(buffer))
        while (frame := frames.next_frame()) is not None:
            self.send(decode_from_worker(frame))


class _Link(FakeLink):
    """Delivers the worker's reports to `router`."""

    def __init__(self, cluster: SimulatedCluster, worker: _Worker, router: Router, *, same_host: bool) -> None:
        self.to_worker, self.to_gateway = _Wire(cluster), _Wire(cluster)
        super().__init__(
            f"w{worker.number}",
            worker.card,
            same_host=same_host,
            send=lambda message: self.to_worker.send(lambda: self._received(message)),
        )
        self.router = router
        self.join()
        receive: Callable[[Any], object] = self.worker.reports.received
        if cluster.meter is not None:
            reports: Any = self.worker.reports
            receive, reports.apply = cluster.meter.receiving(receive), cluster.meter.applying(reports.apply)
        self._session = SessionReports(
            cast("Any", worker),
            cast("Any", _Connection(self.to_gateway, receive)),
            _RPC,
            relay=worker.relay,
        )
        self._session.start()
        self._cluster = cluster
        cluster.loop.call_later(_RPC.heartbeat_interval_s, self._beat)

    def _received(self, message: Any) -> None:
        self._session.received(message)

    def _beat(self) -> None:
        if self._cluster.num_unfinished:
            self._session.report_load()
            self._cluster.loop.call_later(_RPC.heartbeat_interval_s, self._beat)


class _Gateway:
    def __init__(self, cluster: SimulatedCluster, config: RoutingConfig, number: int, seed: int) -> None:
        clock = cluster.loop.time
        self.host = cluster.host(number)
        self.router = Router(config, clock=clock, seed=seed)
        self._cluster = cluster
        self._links: dict[str, tuple[_Link, _Worker]] = {}
        metrics = Metrics(CollectorRegistry())
        self._routes = Routes(self.router, WorkerPool([]), metrics)

    def connect(self, worker: _Worker) -> None:
        link = _Link(self._cluster, worker, self.router, same_host=worker.host is self.host)
        self._links[link.name] = link, worker

    def arrive(self, turn: Turn) -> None:
        arrived_s = self._cluster.loop.time()
        self.host.media.prepare(
            turn.media, self.router, lambda media: self._send(turn._replace(media=media), arrived_s)
        )

    def _send(self, turn: Turn, arrived_s: float) -> None:
        block_size = self._cluster.simulated.block_size
        ids = prompt_block_ids(turn.token_ids, block_size=block_size, media=turn.media)
        self.host.prepared(turn.media)
        request = RoutingRequest(
            {block_size: ids},
            len(turn.token_ids),
            turn.media,
            # On one host, the same for all workers.
            sum(map(num_bytes, turn.media)) if len(self._cluster.hosts) > 1 else 0,
            session_id=turn.session,
        )
        started = time.thread_time()
        split = self.router.pick_split(request)
        sent = self._request(turn, arrived_s, split.routed)
        if split.prefill is None:
            self._hand_over(sent)
        else:
            self._routes.begin(sent.route, turn.session, is_sent=False)
            received = replace(sent, is_received=True)
            prefill = self._request(turn, arrived_s, split.prefill)
            self._hand_over(replace(prefill, then=lambda: self._hand_over(received)))
        if self._cluster.meter is not None:
            self._cluster.meter.decisions_s.append(time.thread_time() - started)

    def _request(self, turn: Turn, arrived_s: float, routed: RoutedRequest) -> _Request:
        link, _worker = self._links[routed.worker_id]
        return _Request(turn, arrived_s, Route(link, link.client, routed, PromptPrefix([]), None), link)

    def _hand_over(self, sent: _Request) -> None:
        link, worker = self._links[sent.link.name]
        self.host.hand_over(sent.turn.media, worker.host, lambda: link.to_worker.send(lambda: worker.submit(sent)))
        self._routes.begin(sent.route, sent.turn.session)


@dataclass(frozen=True)
class _Request:
    """With `then`, the worker only computes the prompt, and that is called at the gateway; if it `is_received`, another
    one has computed it."""

    turn: Turn
    arrived_s: float
    route: Route
    link: _Link
    then: Callable[[], object] | None = None
    is_received: bool = False


class _Worker:
    """A worker, and the `Handler` of its sessions."""

    is_stalled = is_draining = has_unknown_blocks = False

    def __init__(self, cluster: SimulatedCluster, number: int, card: ModelCard) -> None:
        self.number = number
        self.card = card
        self.is_stalled = self.is_draining = self.has_unknown_blocks = False
        self.host = cluster.host(number)
        self.relay = PendingWorkRelay()
        self._cluster = cluster
        self._scheduler = simulated_scheduler(cluster.simulated)
        self._blocks = BlockReports(card)
        self._requests: dict[SimulatedSequence, _Request] = {}
        self._token_s: dict[SimulatedSequence, float] = {}
        self._stepping = False

    def loads(self) -> Sequence[WorkerLoad]:
        scheduler = self._scheduler
        return [WorkerLoad(len(scheduler.running), len(scheduler.waiting), scheduler.pool.usage)]

    def watch_arena(self, listener: Callable[[str | None], None]) -> Callable[[], None]:
        return lambda: None

    def watch_blocks(self, listener: Callable[[KvChange], None]) -> Callable[[], None]:
        return self._blocks.watch(listener)

    def held_blocks(self) -> Mapping[int, Sequence[int]]:
        return self._blocks.held()

    def submit(self, request: _Request) -> None:
        self.host.media.find(self.number, request.turn.media, lambda embedded: self._add(request, embedded))

    def _add(self, request: _Request, embedded: Collection[str]) -> None:
        turn = request.turn
        items = [
            SimulatedItem(s.mm_hash, PlaceholderRange(s.offset, s.length), s.modality, s.mm_hash in embedded)
            for s in turn.media
        ]
        sequence = SimulatedSequence(
            turn.session,
            turn.token_ids,
            block_size=self._cluster.simulated.block_size,
            max_tokens=turn.num_answer_tokens if request.then is None else 1,
            items=items,
        )
        self._requests[sequence] = request
        if request.is_received:
            sequence.num_received = sequence.num_prompt_tokens - 1
            transfer_s = sequence.num_received * self._cluster.simulated.transfer_token_ms * 1e-3
            self._cluster.loop.call_later(transfer_s, self._schedule, sequence)
        else:
            self._schedule(sequence)

    def _schedule(self, sequence: SimulatedSequence) -> None:
        self._scheduler.add(sequence)
        self.relay.load_changed()
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        step = self._scheduler.step()
        self._stepping = bool(step.tokens)
        if self._stepping:
            duration = step_s(self._cluster.simulated, step)
            if self._cluster.counts(self._cluster.loop.time()):
                outcome = self._cluster.outcome
                outcome.work_s[self.number] += duration - self._cluster.simulated.step_ms * 1e-3
                outcome.num_encoded += step.num_embeds
            self._cluster.loop.call_later(duration, self._complete, step)

    def _complete(self, step: SimulatedStep) -> None:
        now = self._cluster.loop.time()
        for sequence in self._scheduler.complete(step):
            before = self._token_s.get(sequence)
            if before is not None and self._cluster.counts(before):
                self._cluster.outcome.gaps_s.append(now - before)
            self._token_s[sequence] = now
            if len(sequence.token_ids) == sequence.num_prompt_tokens + 1:
                self._began(sequence)
            if sequence.finished:
                self._finished(sequence)
        events = self._scheduler.take_events()
        if events:
            self._blocks.apply(KvEventBatch(0, events))
        self._step()

    def _began(self, sequence: SimulatedSequence) -> None:
        request, outcome = self._requests[sequence], self._cluster.outcome
        self.host.media.computed(self.number, request.turn.media)
        num_cached = sequence.num_cached_tokens or 0
        if request.arrived_s >= outcome.began_s and request.then is None:
            outcome.ttft_s.append(self._cluster.loop.time() + self._cluster.hop_s - request.arrived_s)
            outcome.num_tokens += sequence.num_prompt_tokens
            outcome.num_cached += num_cached
            media = request.turn.media
            outcome.num_embeds += sum({s.mm_hash: s.length for s in media}.values())
            outcome.num_needed += sum({s.mm_hash: s.length for s in media if s.end > num_cached}.values())
        num_own = num_cached - sequence.num_transferred
        request.link.to_gateway.send(lambda: request.route.routed.prefilled(num_own))

    def _finished(self, sequence: SimulatedSequence) -> None:
        request = self._requests.pop(sequence)
        del self._token_s[sequence]
        request.link.to_gateway.send(request.route.routed.release)
        if request.then is not None:
            request.link.to_gateway.send(request.then)
            self.relay.load_changed()
            return
        self._cluster.num_unfinished -= 1
        self._cluster.outcome.last_end_s = self._cluster.loop.time()
        self.relay.load_changed()
        self._cluster.finished(request.turn.session)


def counted(turns: list[Turn]) -> list[Turn]:
    return turns[int(len(turns) * WARM_UP) :]
