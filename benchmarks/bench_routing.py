"""Routing policies on simulated workers: cache hits, and time to first token.

Everything runs in virtual time, in one process: the simulated engines' own schedulers and caches, and the router;
connections are modelled as delays of events and loads. So a run does not depend on the machine's load, and is
deterministic. All policies get the same requests. RPC and worker processes are not included.

Utilisation is the share of the workers' time that the work would fill without the fixed part of steps; it is measured
for round-robin, and sets the rate for all policies.

`one hot image` is a case in which a policy that considers only caches fails: all requests would queue at the worker
that has it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

import harness
from medialane.core.block_hash import prompt_block_ids
from medialane.core.feature import PlaceholderRange
from medialane.core.kv_events import BlockStored, KvChange, KvEvent
from medialane.core.request import Endpoint, WorkerLoad
from medialane.routing.config import PolicyName, RoutingConfig
from medialane.routing.request import RoutingRequest
from medialane.routing.routed_request import RoutedRequest
from medialane.routing.router import Router
from medialane.worker.simulated.config import SimulatedConfig
from medialane.worker.simulated.engine import simulated_card, simulated_scheduler, step_s
from medialane.worker.simulated.scheduler import Step, answer_token
from medialane.worker.simulated.sequence import Item, SimulatedSequence
from traces import SessionTrace, Turn, session_turns

ABOUT = "policies side by side on simulated workers: cached tokens, time to first token, balance"

#: A 7B model's KV cache on a GPU of 80 GB: 57 kB a token, 55 GB.
CONFIG = SimulatedConfig(num_kv_blocks=60_000)
POLICIES: tuple[PolicyName, ...] = ("cost", "round-robin", "least-loaded", "prefix-only")
#: Delays of a connection: events and loads are batched.
EVENTS_S, LOAD_S = 0.010, 0.022
NUM_WORKERS = 8
MODERATE, HIGH = 0.5, 0.8
#: Three of four requests ask about the same image, each with a different long question.
HOT = SessionTrace(
    num_system_prompts=1,
    num_images=1,
    image=(1000, 1000),
    images_of_first=(0.25, 0.75),
    more_images=0.0,
    question=(300, 1500),
    answer=(10, 50),
    mean_turns=1.0,
    max_turns=1,
)
#: Approximate requests per second and worker that saturate round-robin; the tolerance of the measured utilisation; and
#: the most runs that may take.
GUESS_PER_S = 19.0
CLOSE, _MAX_TRIES = 0.015, 10
#: Requests before caches and queues have reached a steady state are not counted: this share of the trace.
WARM_UP = 0.4


@dataclass
class Outcome:
    """The result of one run."""

    ttft_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0
    work_s: list[float] = field(default_factory=list)
    began_s: float = 0.0
    last_arrival_s: float = 0.0

    @property
    def cached(self) -> float:
        return self.num_cached / self.num_tokens

    @property
    def utilisation(self) -> float:
        return sum(self.work_s) / len(self.work_s) / (self.last_arrival_s - self.began_s)

    @property
    def imbalance(self) -> float:
        return max(self.work_s) * len(self.work_s) / sum(self.work_s)


class SimulatedCluster:
    """One router and its workers in virtual time."""

    def __init__(self, num_workers: int, config: RoutingConfig, simulated: SimulatedConfig = CONFIG) -> None:
        self.now = 0.0
        self.outcome = Outcome(work_s=[0.0] * num_workers)
        self._simulated = simulated
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._router = Router(config, clock=lambda: self.now, wall_clock=lambda: self.now, seed=1)
        self._workers = [_Worker(self, number) for number in range(num_workers)]
        card = simulated_card(simulated, "m")
        for worker in self._workers:
            worker.slot = self._router.join(
                Endpoint(f"w{worker.number}", "", True, WorkerLoad(), 0, same_host=True, card=card)
            )
        self.router = self._router

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time_s, next(self._order), action))

    def run(self, turns: list[Turn]) -> Outcome:
        for turn in turns:
            self.at(turn.time_s, lambda turn=turn: self._arrive(turn))  # type: ignore[misc]
        self.outcome.began_s, self.outcome.last_arrival_s = _counted(turns)[0].time_s, turns[-1].time_s
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        return self.outcome

    def _arrive(self, turn: Turn) -> None:
        block_size = self._simulated.block_size
        ids = prompt_block_ids(turn.token_ids, block_size=block_size, media=turn.media)
        request = RoutingRequest(ids, block_size, len(turn.token_ids), turn.media, model="m", session_id=turn.session)
        routed = self._router.pick(request)
        routed.begin()
        self._workers[routed.slot].submit(turn, routed)


class _Worker:
    def __init__(self, cluster: SimulatedCluster, number: int) -> None:
        self.number = number
        self.slot = 0
        self._cluster = cluster
        self._scheduler = simulated_scheduler(cluster._simulated)
        self._requests: dict[SimulatedSequence, tuple[RoutedRequest, float]] = {}
        self._counts: dict[int, int] = {}
        self._stepping = self._reporting = False
        self._sequence = itertools.count()

    def submit(self, turn: Turn, routed: RoutedRequest) -> None:
        items = [Item(s.mm_hash, PlaceholderRange(s.offset, s.length), s.modality) for s in turn.media]
        sequence = SimulatedSequence(
            turn.session,
            turn.token_ids,
            block_size=self._cluster._simulated.block_size,
            max_tokens=turn.num_answer_tokens,
            items=items,
        )
        self._requests[sequence] = routed, self._cluster.now
        self._scheduler.add(sequence)
        self._load_changed()
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        step = self._scheduler.step()
        self._stepping = bool(step.tokens)
        if self._stepping:
            duration = step_s(self._cluster._simulated, step)
            outcome = self._cluster.outcome
            if outcome.began_s <= self._cluster.now <= outcome.last_arrival_s:
                outcome.work_s[self.number] += duration - self._cluster._simulated.step_ms * 1e-3
            self._cluster.at(self._cluster.now + duration, lambda: self._complete(step))

    def _complete(self, step: Step) -> None:
        for sequence in self._scheduler.complete(step):
            routed, arrived = self._requests[sequence]
            if len(sequence.token_ids) == sequence.num_prompt_tokens + 1:
                if arrived >= self._cluster.outcome.began_s:
                    self._count(sequence, arrived)
                routed.prefilled(sequence.num_cached_tokens)
            if sequence.finished:
                routed.release()
                del self._requests[sequence]
                self._load_changed()
        change = self._change(self._scheduler.take_events())
        if change is not None:
            self._cluster.at(self._cluster.now + EVENTS_S, lambda: self._cluster.router.change(self.slot, change))
        self._step()

    def _count(self, sequence: SimulatedSequence, arrived: float) -> None:
        outcome = self._cluster.outcome
        outcome.ttft_s.append(self._cluster.now - arrived)
        outcome.num_tokens += sequence.num_prompt_tokens
        outcome.num_cached += sequence.num_cached_tokens or 0

    def _change(self, events: list[KvEvent]) -> KvChange | None:
        """Convert events like a worker's block table, in which a block may be held more than once."""
        before = dict[int, bool]()
        for event in events:
            delta = 1 if isinstance(event, BlockStored) else -1
            for block_id in getattr(event, "block_hashes", ()):
                count = self._counts.get(block_id, 0)
                before.setdefault(block_id, count > 0)
                self._counts[block_id] = count + delta
        stored = [i for i, held in before.items() if self._counts[i] > 0 and not held]
        removed = [i for i, held in before.items() if self._counts[i] == 0 and held]
        for block_id in before:
            if not self._counts[block_id]:
                del self._counts[block_id]
        if not (stored or removed):
            return None
        return KvChange(0, next(self._sequence), _packed(stored), _packed(removed))

    def _load_changed(self) -> None:
        if not self._reporting:
            self._reporting = True
            self._cluster.at(self._cluster.now + LOAD_S, self._report)

    def _report(self) -> None:
        self._reporting = False
        scheduler = self._scheduler
        load = WorkerLoad(len(scheduler.running), len(scheduler.waiting), scheduler.pool.usage)
        self._cluster.router.report(self.slot, load)


def oracle(turns: list[Turn], block_size: int = CONFIG.block_size) -> float:
    """Return the share of tokens that one unlimited cache would hit if each request were done when the next arrives."""
    held: set[int] = set()
    num_tokens = num_cached = 0
    began_s = _counted(turns)[0].time_s
    for turn in turns:
        ids = prompt_block_ids(turn.token_ids, block_size=block_size, media=turn.media).tolist()
        usable = ids[: (len(turn.token_ids) - 1) // block_size]
        if turn.time_s >= began_s:
            found = next((i for i, block_id in enumerate(usable) if block_id not in held), len(usable))
            num_cached += block_size * found
            num_tokens += len(turn.token_ids)
        answered = [*turn.token_ids, *map(answer_token, range(turn.num_answer_tokens - 1))]
        held.update(prompt_block_ids(answered, block_size=block_size, media=turn.media).tolist())
    return num_cached / num_tokens


def _counted(turns: list[Turn]) -> list[Turn]:
    return turns[int(len(turns) * WARM_UP) :]


def rate_for(utilisation: float, num_workers: int, trace: SessionTrace, router: PolicyName = "round-robin") -> float:
    """Search for the rate that gives this utilisation: queues grow long before all workers are busy."""
    low, high = (0.0, 0.0), (math.inf, 1.0)
    rate = GUESS_PER_S * num_workers * utilisation
    for _ in range(_MAX_TRIES):
        turns = list(session_turns(trace._replace(rate_per_s=rate)))
        found = SimulatedCluster(num_workers, RoutingConfig(router=router)).run(turns).utilisation
        if abs(found - utilisation) <= CLOSE:
            return rate
        if found < utilisation:
            low = rate, found
        else:
            high = rate, found
        if high[0] == math.inf:
            rate *= utilisation / found
        else:
            rate = low[0] + (high[0] - low[0]) * (utilisation - low[1]) / (high[1] - low[1])
    raise RuntimeError(f"no rate found that keeps {num_workers} workers {utilisation:.0%} busy: {low} to {high}")


def compare(
    rate: float, num_workers: int, trace: SessionTrace, policies: tuple[PolicyName, ...]
) -> tuple[list[dict[str, object]], dict[str, Outcome], float]:
    """Run every policy on the same requests; return rows, outcomes, and the oracle's share."""
    turns = list(session_turns(trace._replace(rate_per_s=rate)))
    best = oracle(turns)
    rows: list[dict[str, object]] = []
    outcomes: dict[str, Outcome] = {}
    for name in policies:
        started = time.monotonic()
        found = outcomes[name] = SimulatedCluster(num_workers, RoutingConfig(router=name)).run(turns)
        rows.append(
            {
                "policy": name,
                "workers": num_workers,
                "requests/s": rate,
                "utilisation": found.utilisation,
                "cached": found.cached,
                "of oracle": found.cached / best,
                "ttft p50 ms": harness.percentile(found.ttft_s, 0.5) * 1e3,
                "ttft p99 ms": harness.percentile(found.ttft_s, 0.99) * 1e3,
                "worst/mean": found.imbalance,
                "took s": time.monotonic() - started,
            }
        )
    return rows, outcomes, best


def run(options: harness.Options) -> harness.Report:
    report = harness.Report("routing")
    trace = SessionTrace(num_turns=2000 if options.quick else 8000)
    policies: tuple[PolicyName, ...] = POLICIES[:2] if options.quick else POLICIES
    rates = [
        GUESS_PER_S * NUM_WORKERS * u if options.quick else rate_for(u, NUM_WORKERS, trace) for u in (MODERATE, HIGH)
    ]
    rows, outcomes, best = compare(rates[0], NUM_WORKERS, trace, policies)
    report.tables[f"at {MODERATE:.0%} utilisation of round-robin (oracle {best:.3f})"] = rows
    cost = outcomes["cost"]
    report.bars.append(
        harness.Bar("cached tokens, of the oracle's, at moderate load", cost.cached / best, 0.9, "at least")
    )
    rows, outcomes, best = compare(rates[1], NUM_WORKERS, trace, policies)
    report.tables[f"at {HIGH:.0%} utilisation of round-robin (oracle {best:.3f})"] = rows
    report.bars += _bars(outcomes["cost"], outcomes["round-robin"], {0.5: 0.5, 0.99: 0.8})
    hot = HOT._replace(num_turns=trace.num_turns)
    rows, outcomes, best = compare(rate_for(HIGH, NUM_WORKERS, hot), NUM_WORKERS, hot, policies)
    report.tables[f"one hot image, at {HIGH:.0%} utilisation of round-robin (oracle {best:.3f})"] = rows
    report.bars += _bars(outcomes["cost"], outcomes["round-robin"], {0.99: 1.0}, prefix="one hot image: ")
    return report


def scale(num_workers: int) -> harness.Report:
    """Compare at moderate load with many workers; takes minutes, so it runs only as `python bench_routing.py 64`."""
    trace = SessionTrace(num_turns=300 * num_workers if num_workers <= 100 else 30_000)
    rows, _, best = compare(GUESS_PER_S * num_workers * MODERATE, num_workers, trace, POLICIES[:2])
    return harness.Report("routing", {f"{num_workers} workers (oracle {best:.3f})": rows})


def _bars(cost: Outcome, robin: Outcome, limits: dict[float, float], *, prefix: str = "") -> list[harness.Bar]:
    """`limits`: share of requests -> the limit of that TTFT percentile as a multiple of round-robin's."""
    bars = [harness.Bar(f"{prefix}worst worker's load, of the mean", cost.imbalance, 1.5, "at most")]
    for share, limit in limits.items():
        ratio = harness.percentile(cost.ttft_s, share) / harness.percentile(robin.ttft_s, share)
        bars.append(harness.Bar(f"{prefix}ttft p{share * 100:g}, of round-robin's", ratio, limit, "at most"))
    return bars


def _packed(ids: list[int]) -> bytes:
    return np.array(ids, np.dtype("<u8")).tobytes()


if __name__ == "__main__":
    print(harness.show(scale(int(sys.argv[1]))))
