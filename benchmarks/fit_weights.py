"""Checks the router's default weights: varies each separately, on simulated workers.

python benchmarks/fit_weights.py [--quick] [--json FILE]

The load is one at which weights matter: the rate that keeps the workers of the `cost` router 80 % busy (round-robin
would be saturated). Every value gets the same requests, of several traces; the result is the mean over traces of the
TTFT's p50 and p99, each as a ratio to the default's. The loss of a default is what the best other value would gain, by
the geometric mean of both. The simulated engine's constants are those of a 7B model, like the defaults: for other
engines set `prefill_ms_per_token` and `encoder_ms_per_token` to measured values; the other defaults can stay.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

import harness
from bench_routing import NUM_WORKERS, rate_for
from medialane.routing.config import RoutingConfig
from simulated_cluster import Outcome, SimulatedCluster
from traces import SessionTrace, session_turns

WEIGHTS = (
    "prefill_ms_per_token",
    "encoder_ms_per_token",
    "request_ms",
    "contention_weight",
    "running_ms",
    "over_capacity_ms",
    "kv_pressure_ms",
    "session_ms",
)
FACTORS = (0.0, 0.5, 2.0, 4.0)
UTILISATION = 0.8
#: The gain of another value above which a default counts as wrong: traces differ by about as much.
MAX_LOSS = 1.1
P50, P99 = "ttft p50 / default's", "ttft p99 / default's"


def fit(num_turns: int, num_traces: int, factors: Sequence[float] = FACTORS) -> harness.Report:
    traces = [SessionTrace(num_turns=num_turns, seed=seed) for seed in range(1, 1 + num_traces)]
    rates = [rate_for(UTILISATION, NUM_WORKERS, trace, "cost") for trace in traces]
    turns = [list(session_turns(t._replace(rate_per_s=r))) for t, r in zip(traces, rates, strict=True)]
    default = RoutingConfig()
    wanted = [SimulatedCluster(NUM_WORKERS, default).run(found) for found in turns]
    report = harness.Report("fit_weights")
    rows: list[dict[str, object]] = []
    for name in WEIGHTS:
        for factor in factors:
            value = getattr(default, name) * factor
            config = msgspec.structs.replace(default, **{name: value})
            outcomes = [SimulatedCluster(NUM_WORKERS, config).run(found) for found in turns]
            p50, p99 = (_ratio(outcomes, wanted, share) for share in (0.5, 0.99))
            rows.append(
                {
                    "weight": name,
                    "value": value,
                    "of default": factor,
                    P50: p50,
                    P99: p99,
                }
            )
            print(rows[-1], flush=True)
    judge(report, rows)
    report.tables[f"one weight changed, {UTILISATION:.0%} utilisation, {len(traces)} traces of {num_turns}"] = rows
    return report


def judge(report: harness.Report, rows: Sequence[dict[str, object]]) -> None:
    """Add a bar for each default: its loss to the best other value. A weight that changes nothing here is only named:
    its bar could not fail."""
    idle = []
    for name in WEIGHTS:
        found = [(float(str(row[P50])), float(str(row[P99]))) for row in rows if row["weight"] == name]
        if all(p50 == p99 == 1.0 for p50, p99 in found):
            idle.append(name)
            continue
        best = min(1.0, *(math.sqrt(p50 * p99) for p50, p99 in found))
        report.bars.append(harness.Bar(f"{name}: loss of the default to the best other", 1 / best, MAX_LOSS, "at most"))
    if idle:
        report.notes.append(
            f"no value of these changed anything at this load, so they are not judged: {', '.join(idle)}"
        )


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
    report = fit(2000, 1, (0.0, 4.0)) if options.quick else fit(3000, 2)
    print(harness.show(report))
    if options.json is not None:
        options.json.write_bytes(harness.document([report], measured_on))


if __name__ == "__main__":
    main()
