"""Checks the router's default weights: varies each separately, on simulated workers.

python benchmarks/fit_weights.py [--quick] [--json FILE]

The load is one at which weights matter: the workers of the `cost` router are about 80 % busy (round-robin would be
saturated). Each weight is varied in all cases in which it could matter: the workers of a host share their
embeddings, or nothing is kept; there is one host, or there are two, with a gateway and embeddings each and a network
between them; or engines that are short of KV cache and of sequences. Every value gets the same requests, of several
traces; the result is the mean over traces of the TTFT's p50 and p99, each as a ratio to the default's. The loss of a
default is what the best other value would gain, by the geometric mean of both; a default must be right in each case,
since it is the same for all. Limits and times (`max_in_flight`, `session_ttl_s`, ...) are no weights.

The simulated engine's constants are those of a 7B model, like the defaults: for other engines set
`prefill_ms_per_token`, `encoder_ms_per_token` and `load_ms_per_mib` to measured values; the other defaults can stay.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

import harness
from bench_routing import HOT, NUM_WORKERS
from medialane.routing import EncodeCosts, RoutingConfig
from medialane.testing.simulated import SimulatedConfig
from medialane.types.setting import NonNegativeFloat
from simulated_cluster import CONFIG, HOP_S, Outcome, SimulatedCluster
from simulated_media import KeepsEmbeddings, KeepsNothing
from traces import SessionTrace, Turn, session_turns

FACTORS = (0.0, 0.5, 2.0)
#: Instead of multiples of the default.
VALUES = {"kv_pressure_threshold": (0.5, 0.9, 0.97), "temperature_ms": (1.0, 5.0)}
COMPUTING = ("prefill_ms_per_token", "encoder_ms_per_token", "contention_weight", "session_ms")
ANYWHERE = (*COMPUTING, "request_ms", "running_ms")
TRANSFERS = ("local_ms_per_mib", "remote_ms", "remote_ms_per_mib")
SCARCE = ("over_capacity_ms", "kv_pressure_ms", "kv_pressure_threshold")
LOADS = "load_ms_per_mib"
#: The gain of another value above which a default counts as wrong: traces differ by about as much.
MAX_LOSS = 1.1
P50, P99 = "ttft p50 / default's", "ttft p99 / default's"
#: Pauses are short, so that most requests of a trace continue a session.
SESSIONS = SessionTrace(least_pause_s=2.0, mean_think_s=1.0)
#: Engines with so few KV blocks, and sequences, that requests wait for them.
SMALL = replace(CONFIG, num_kv_blocks=9000, max_num_seqs=64)


class Case(NamedTuple):
    """A cluster, its requests, and the weights that are varied there. At this rate, of requests per second and worker,
    the `cost` router keeps the workers about 80 % busy, or waiting for what is scarce."""

    name: str
    weights: Sequence[str]
    rate_per_s: float
    keeps_embeddings: bool = True
    num_hosts: int = 1
    simulated: SimulatedConfig = CONFIG
    trace: SessionTrace = SESSIONS


CASES = (
    Case("one host", (*ANYWHERE, LOADS, "temperature_ms"), 42.0),
    Case("nothing kept", ANYWHERE, 37.0, keeps_embeddings=False),
    Case("two hosts", (*COMPUTING, LOADS, *TRANSFERS), 40.0, num_hosts=2),
    Case("two hosts, nothing kept", TRANSFERS, 37.0, keeps_embeddings=False, num_hosts=2),
    Case("hot image", ("contention_weight", "session_ms", LOADS), 20.5, trace=HOT),
    Case("scarce", SCARCE, 36.0, simulated=SMALL),
    Case("scarce, nothing kept", SCARCE, 31.0, keeps_embeddings=False, simulated=SMALL),
)


def fit(
    num_turns: int, num_traces: int, cases: Sequence[Case] = CASES, factors: Sequence[float] = FACTORS
) -> harness.Report:
    check_complete()
    report = harness.Report("fit_weights")
    done = _progress(sum(len(_values(name, factors)) for case in cases for name in case.weights))
    for case in cases:
        rate = NUM_WORKERS * case.rate_per_s
        traces = [case.trace._replace(num_turns=num_turns, seed=1 + n, rate_per_s=rate) for n in range(num_traces)]
        turns = [list(session_turns(trace)) for trace in traces]
        wanted = [_run(case, RoutingConfig(), trace) for trace in turns]
        busy = sum(outcome.utilisation for outcome in wanted) / len(wanted)
        rows: list[dict[str, object]] = []
        for name in case.weights:
            for value in _values(name, factors):
                outcomes = [_run(case, replace(RoutingConfig(), **{name: value}), trace) for trace in turns]
                p50, p99 = (_ratio(outcomes, wanted, share) for share in (0.5, 0.99))
                default = getattr(RoutingConfig(), name)
                rows.append({"weight": name, "default": default, "value": value, P50: p50, P99: p99})
                done(f"{case.name}: {name} {value:g}: p50 {p50:.3f}, p99 {p99:.3f}")
        title = f"{case.name}, {len(traces)} traces of {num_turns} at {rate:.0f}/s, workers {busy:.0%} busy"
        report.tables[title] = rows
        judge(report, case, rows)
    return report


def check_complete() -> None:
    """Raise ValueError unless each weight of the configuration is varied in a case."""
    missing = {f.name for f in msgspec.structs.fields(RoutingConfig) if f.type == NonNegativeFloat}
    missing -= {name for case in CASES for name in case.weights}
    if missing:
        raise ValueError(f"no case varies {', '.join(sorted(missing))}")


def _values(name: str, factors: Sequence[float]) -> Sequence[float]:
    return VALUES.get(name) or [getattr(RoutingConfig(), name) * factor for factor in factors]


def _progress(total: int) -> Callable[[str], None]:
    began_s, count = time.monotonic(), 0

    def done(text: str) -> None:
        nonlocal count
        count += 1
        print(f"{count}/{total}, {time.monotonic() - began_s:.0f} s: {text}", flush=True)

    return done


def _run(case: Case, config: RoutingConfig, turns: list[Turn]) -> Outcome:
    # The wait for another's encoding does not depend on the router's weights.
    costs = EncodeCosts.of(RoutingConfig())
    media = [
        KeepsEmbeddings("workers", 0, costs, case.simulated, hop_s=HOP_S) if case.keeps_embeddings else KeepsNothing()
        for _ in range(case.num_hosts)
    ]
    cluster = SimulatedCluster(
        NUM_WORKERS,
        config,
        simulated=case.simulated,
        num_gateways=case.num_hosts,
        spread="sessions",
        media=media,
    )
    return cluster.run(turns)


def judge(report: harness.Report, case: Case, rows: Sequence[dict[str, object]]) -> None:
    """Add a bar for each default: its loss to the best other value. A weight that changes nothing here is only named:
    its bar could not fail."""
    idle = []
    for name in case.weights:
        ttft_ratios = [(float(str(row[P50])), float(str(row[P99]))) for row in rows if row["weight"] == name]
        if all(p50 == p99 == 1.0 for p50, p99 in ttft_ratios):
            idle.append(name)
            continue
        best = min(1.0, *(math.sqrt(p50 * p99) for p50, p99 in ttft_ratios))
        label = f"{name}, {case.name}: loss of the default to the best other"
        report.bars.append(harness.Bar(label, 1 / best, MAX_LOSS, "at most"))
    if idle:
        report.notes.append(f"{case.name}: no value of these changed anything, so not judged: {', '.join(idle)}")


def _ratio(outcomes: Sequence[Outcome], wanted: Sequence[Outcome], share: float) -> float:
    """Return the geometric mean over traces."""
    logs = [
        math.log(harness.percentile(a.ttft_s, share) / harness.percentile(b.ttft_s, share))
        for a, b in zip(outcomes, wanted, strict=True)
    ]
    return math.exp(sum(logs) / len(logs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short trace, few values")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    measured_on = harness.machine()
    report = fit(500, 1, factors=(0.0,)) if options.quick else fit(1500, 2)
    print(harness.show(report))
    if options.json is not None:
        options.json.write_bytes(harness.document([report], measured_on))


if __name__ == "__main__":
    main()
