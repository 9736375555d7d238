"""Checks the router's default weights: varies each separately, on simulated workers.

python benchmarks/fit_weights.py [--quick] [--json FILE]

The load is one at which weights matter: the rate that keeps the workers of the `cost` router 80 % busy (round-robin
would be saturated). The workers share the embeddings of a host. Every value gets the same requests, of several traces;
the result is the mean over traces of the TTFT's p50 and p99, each as a ratio to the default's. The loss of a default is
what the best other value would gain, by the geometric mean of both. The simulated engine's constants are those of a 7B
model, like the defaults: for other engines set `prefill_ms_per_token`, `encoder_ms_per_token` and `load_ms_per_mib` to
measured values; the other defaults can stay.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

import harness
from bench_routing import NUM_WORKERS, find_rate
from medialane.routing.config import RoutingConfig
from medialane.routing.encode_choice import EncodeCosts
from simulated_cluster import CONFIG, HOP_S, Outcome, SimulatedCluster
from simulated_media import KeepsEmbeddings
from traces import SessionTrace, Turn, session_turns

WEIGHTS = (
    "prefill_ms_per_token",
    "encoder_ms_per_token",
    "load_ms_per_mib",
    "request_ms",
    "contention_weight",
    "running_ms",
    "over_capacity_ms",
    "kv_pressure_ms",
    "session_ms",
)
FACTORS = (0.0, 0.5, 2.0, 4.0)
UTILISATION = 0.8
#: About the requests per second and worker of that.
GUESS_PER_S = 59.0
#: Tolerance: with cache-aware routing, the work of a trace jumps with its rate.
CLOSE = 0.05
#: The gain of another value above which a default counts as wrong: traces differ by about as much.
MAX_LOSS = 1.1
P50, P99 = "ttft p50 / default's", "ttft p99 / default's"


def fit(num_turns: int, num_traces: int, factors: Sequence[float] = FACTORS) -> harness.Report:
    traces = [SessionTrace(num_turns=num_turns, seed=seed) for seed in range(1, 1 + num_traces)]
    rates = [_rate(trace) for trace in traces]
    turns = [list(session_turns(t._replace(rate_per_s=r))) for t, r in zip(traces, rates, strict=True)]
    default = RoutingConfig()
    wanted = [_run(default, found) for found in turns]
    report = harness.Report("fit_weights")
    rows: list[dict[str, object]] = []
    for name in WEIGHTS:
        for factor in factors:
            value = getattr(default, name) * factor
            config = msgspec.structs.replace(default, **{name: value})
            outcomes = [_run(config, found) for found in turns]
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


def _run(config: RoutingConfig, turns: list[Turn]) -> Outcome:
    media = KeepsEmbeddings("workers", 0, EncodeCosts.of(config), CONFIG, hop_s=HOP_S)
    return SimulatedCluster(NUM_WORKERS, config, media=media).run(turns)


def _rate(trace: SessionTrace) -> float:
    def measure(rate: float) -> float:
        return _run(RoutingConfig(), list(session_turns(trace._replace(rate_per_s=rate)))).utilisation

    return find_rate(UTILISATION, measure, NUM_WORKERS * GUESS_PER_S, close=CLOSE)


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
