"""Routing policies on simulated workers: cache hits, and time to first token.

Everything runs in virtual time, in one process (`simulated_cluster`). All policies get the same requests. RPC
connections and worker processes are not included, but delays of reports are.

Utilisation is the share of the workers' time that the work would fill without the fixed part of steps; all policies
get the rate at which round-robin has about the one named.

`one hot image` is a case in which a policy that considers only caches fails: all requests would queue at the worker
that has it.

`one request at a time` is a case in which nothing waits, so that only the cost of evictions spreads requests: documents
or chats with one system prompt in common, which fit in the caches of all workers together but not in one.

Several gateways are compared with one: each knows its own requests at once, and the others' requests from what the
workers report. Each request reaches any of them (`by requests`), or a session's requests all reach one (`by sessions`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

import harness
from medialane.routing import RoutingConfig
from medialane.routing.config import PolicyName
from medialane.testing.simulated.sequence import answer_of
from medialane.types.kv_blocks import prompt_block_ids
from simulated_cluster import CONFIG, Outcome, SimulatedCluster, Spread, counted
from traces import PacedTrace, SessionTrace, Turn, paced_turns, session_turns

ABOUT = "policies side by side on simulated workers: cached tokens, time to first token, balance"

POLICIES: tuple[PolicyName, ...] = ("cost", "round-robin", "least-loaded", "prefix-only")
NUM_WORKERS = 8
#: Users who think less than others: so a short trace has as many later turns as theirs.
SESSIONS = SessionTrace(least_pause_s=2.0, mean_think_s=4.0)
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
#: Requests per second and worker that keep round-robin's workers about 50 % and 80 % busy, 80 % with `HOT`.
MODERATE_PER_S, HIGH_PER_S, HOT_PER_S = 7.6, 13.7, 20.2

#: Documents of which twelve, four times, are asked about in three rounds.
DOCUMENTS = PacedTrace(num_rounds=3, num_sets=4)
CHATS = PacedTrace(
    document=(50, 200), question=(100, 300), answer=(50, 200), is_chat=True, num_rounds=8, num_sets=3, pace_s=3.0
)


class Paced(NamedTuple):
    """Workers, the tokens that each can cache, and their requests."""

    trace: PacedTrace
    num_tokens: int
    num_workers: int = 2


PACED = {
    "documents": Paced(DOCUMENTS, 30_000),
    "short documents": Paced(DOCUMENTS._replace(document=(200, 400)), 4_500),
    "documents of any length": Paced(DOCUMENTS._replace(num_documents=13, document=(500, 8000)), 38_000),
    "documents of any length, 4 workers": Paced(
        DOCUMENTS._replace(num_documents=26, document=(500, 8000)), 38_000, num_workers=4
    ),
    "long system prompt": Paced(DOCUMENTS._replace(system_prompt=2000, document=(400, 800)), 8_000),
    "chats": Paced(CHATS, 22_000),
}
PACED_SEEDS = 2


class Run(NamedTuple):
    """A number of gateways, and how requests are spread over them."""

    num_gateways: int
    spread: Spread


#: About 80 % of round-robin's capacity, and 70 % of that of `cost`.
GATEWAYS_PER_S, GATEWAYS_BUSY_PER_S = 110.0, 275.0
#: The others are compared with the first.
GATEWAY_RUNS = (
    Run(1, "requests"),
    Run(2, "requests"),
    Run(4, "requests"),
    Run(8, "requests"),
    Run(8, "sessions"),
)


def oracle(turns: list[Turn], block_size: int = CONFIG.block_size) -> float:
    """Return the share of tokens that one unlimited cache would hit if each request were done when the next arrives."""
    held: set[int] = set()
    num_tokens = num_cached = 0
    began_s = counted(turns)[0].time_s
    for turn in turns:
        ids = prompt_block_ids(turn.token_ids, block_size=block_size, media=turn.media).tolist()
        usable = ids[: (len(turn.token_ids) - 1) // block_size]
        if turn.time_s >= began_s:
            num_held = next((i for i, block_id in enumerate(usable) if block_id not in held), len(usable))
            num_cached += block_size * num_held
            num_tokens += len(turn.token_ids)
        hashes = [span.mm_hash for span in turn.media]
        answered = turn.token_ids + answer_of(turn.token_ids, turn.num_answer_tokens - 1, hashes)
        held.update(prompt_block_ids(answered, block_size=block_size, media=turn.media).tolist())
    return num_cached / num_tokens


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
        outcome = outcomes[name] = SimulatedCluster(num_workers, RoutingConfig(router=name)).run(turns)
        rows.append(
            {
                "policy": name,
                "workers": num_workers,
                "requests/s": rate,
                "utilisation": outcome.utilisation,
                "cached": outcome.cached,
                "of oracle": outcome.cached / best,
                "ttft p50 ms": harness.percentile(outcome.ttft_s, 0.5) * 1e3,
                "ttft p99 ms": harness.percentile(outcome.ttft_s, 0.99) * 1e3,
                "worst/mean": outcome.imbalance,
                "took s": time.monotonic() - started,
            }
        )
    return rows, outcomes, best


def run(options: harness.Options) -> harness.Report:
    report = harness.Report("routing")
    for part in PARTS:
        part_report = part(quick=options.quick)
        report.tables |= part_report.tables
        report.bars += part_report.bars
    return report


def moderate(*, quick: bool) -> harness.Report:
    report, outcomes, best = _policies(SESSIONS, MODERATE_PER_S, quick=quick)
    ratio = outcomes["cost"].cached / best
    report.bars.append(harness.Bar("cached tokens, of the oracle's, at moderate load", ratio, 0.9, "at least"))
    return report


def high(*, quick: bool) -> harness.Report:
    report, outcomes, _ = _policies(SESSIONS, HIGH_PER_S, quick=quick)
    report.bars += _bars(outcomes["cost"], outcomes["round-robin"], {0.5: 0.5, 0.99: 0.8})
    return report


def hot_image(*, quick: bool) -> harness.Report:
    report, outcomes, _ = _policies(HOT, HOT_PER_S, quick=quick, prefix="one hot image, ")
    report.bars += _bars(outcomes["cost"], outcomes["round-robin"], {0.99: 1.0}, prefix="one hot image: ")
    return report


def paced(*, quick: bool) -> harness.Report:
    report, rows = harness.Report("routing"), list[dict[str, object]]()
    for name, case in PACED.items():
        cached, imbalance = [], []
        for policy in POLICIES[:2]:
            runs = [_paced_run(case, policy, seed) for seed in range(1 if quick else PACED_SEEDS)]
            cached.append(min(outcome.cached / best for outcome, best in runs))
            imbalance.append(max(outcome.imbalance for outcome, _ in runs))
            row = {"trace": name, "policy": policy, "workers": case.num_workers}
            rows.append(row | {"of oracle": cached[-1], "worst/mean": imbalance[-1]})
        report.bars += [
            harness.Bar(f"one request at a time, {name}: cached tokens, of the oracle's", cached[0], 0.95, "at least"),
            harness.Bar(
                f"one request at a time, {name}: worst worker's load, of the mean", imbalance[0], 1.2, "at most"
            ),
        ]
    report.tables["one request at a time, the worst of several traces"] = rows
    return report


def _paced_run(case: Paced, policy: PolicyName, seed: int) -> tuple[Outcome, float]:
    """Return the outcome, and the oracle's share."""
    turns = list(paced_turns(case.trace._replace(seed=seed)))
    simulated = replace(CONFIG, num_kv_blocks=case.num_tokens // CONFIG.block_size + 1)
    cluster = SimulatedCluster(case.num_workers, RoutingConfig(router=policy), simulated=simulated)
    return cluster.run(turns), oracle(turns)


def gateways(*, quick: bool) -> harness.Report:
    return _gateways(GATEWAYS_PER_S, quick=quick)


def gateways_busy(*, quick: bool) -> harness.Report:
    return _gateways(GATEWAYS_BUSY_PER_S, quick=quick)


PARTS = (moderate, high, hot_image, paced, gateways, gateways_busy)


def _policies(
    trace: SessionTrace, per_worker_per_s: float, *, quick: bool, prefix: str = ""
) -> tuple[harness.Report, dict[str, Outcome], float]:
    trace = trace._replace(num_turns=1000 if quick else 2400)
    policies = POLICIES[:2] if quick else POLICIES
    rows, outcomes, best = compare(per_worker_per_s * NUM_WORKERS, NUM_WORKERS, trace, policies)
    utilisation = outcomes["round-robin"].utilisation
    name = f"{prefix}at {utilisation:.0%} utilisation of round-robin (oracle {best:.3f})"
    return harness.Report("routing", {name: rows}), outcomes, best


def _gateways(rate: float, *, quick: bool) -> harness.Report:
    """Compare several gateways with one."""
    num_traces, num_turns = (1, 500) if quick else (3, 1500)
    traces = [SESSIONS._replace(rate_per_s=rate, num_turns=num_turns, seed=seed) for seed in range(1, 1 + num_traces)]
    outcomes_of: dict[Run, list[Outcome]] = {run: [] for run in GATEWAY_RUNS}
    for trace in traces:
        turns = list(session_turns(trace))
        for run, outcomes in outcomes_of.items():
            cluster = SimulatedCluster(
                NUM_WORKERS,
                RoutingConfig(),
                num_gateways=run.num_gateways,
                spread=run.spread,
                seed=trace.seed,
            )
            outcomes.append(cluster.run(turns))
    one = outcomes_of[GATEWAY_RUNS[0]]
    rows = [_gateway_row(run, outcomes, one) for run, outcomes in outcomes_of.items()]
    report = harness.Report("routing", {f"gateways at {rate:g} requests/s, medians of {num_traces} traces": rows})
    for run, row in list(zip(outcomes_of, rows, strict=True))[1:]:
        label = f"{run.num_gateways} gateways, by {run.spread}, {rate:g}/s:"
        for column, limit in (("cached /1", 0.98), ("not encoded /1", 0.98)):
            value = float(str(row[column]))
            report.bars.append(harness.Bar(f"{label} {column[:-3]}, of one gateway's", value, limit, "at least"))
        p99 = float(str(row["ttft p99 /1"]))
        report.bars.append(harness.Bar(f"{label} ttft p99, of one gateway's", p99, 1.1, "at most"))
    return report


def _gateway_row(run: Run, outcomes: list[Outcome], one: list[Outcome]) -> dict[str, object]:
    """Return medians over traces; `/1` are ratios to one gateway on the same trace."""
    figures: dict[str, Callable[[Outcome], float]] = {
        "cached": lambda outcome: outcome.cached,
        "encoder hits": lambda outcome: outcome.encoder_hits,
        "not encoded": lambda outcome: outcome.not_encoded,
        "ttft p50": lambda outcome: harness.percentile(outcome.ttft_s, 0.5) * 1e3,
        "ttft p99": lambda outcome: harness.percentile(outcome.ttft_s, 0.99) * 1e3,
        "utilisation": lambda outcome: outcome.utilisation,
    }
    row: dict[str, object] = {"gateways": run.num_gateways, "by": run.spread}
    for name, figure in figures.items():
        row[name] = harness.median(map(figure, outcomes))
        row[f"{name} /1"] = harness.median(figure(a) / figure(b) for a, b in zip(outcomes, one, strict=True))
    return row


def scale(num_workers: int) -> harness.Report:
    """Compare at moderate load with many workers; takes minutes, so it runs only as `python bench_routing.py 64`."""
    trace = SessionTrace(num_turns=300 * num_workers if num_workers <= 100 else 30_000)
    rows, _, best = compare(MODERATE_PER_S * num_workers, num_workers, trace, POLICIES[:2])
    return harness.Report("routing", {f"{num_workers} workers (oracle {best:.3f})": rows})


def _bars(cost: Outcome, robin: Outcome, limits: dict[float, float], *, prefix: str = "") -> list[harness.Bar]:
    """`limits`: share of requests -> the limit of that TTFT percentile as a multiple of round-robin's."""
    bars = [harness.Bar(f"{prefix}worst worker's load, of the mean", cost.imbalance, 1.5, "at most")]
    for share, limit in limits.items():
        ratio = harness.percentile(cost.ttft_s, share) / harness.percentile(robin.ttft_s, share)
        bars.append(harness.Bar(f"{prefix}ttft p{share * 100:g}, of round-robin's", ratio, limit, "at most"))
    return bars


if __name__ == "__main__":
    print(harness.show(scale(int(sys.argv[1]))))
