"""Prompts that other workers compute: tokens of running answers, and first tokens, with as many GPUs.

Simulated workers in virtual time (`simulated_cluster`), of a 7B model on one GPU each; a run does not depend on the
machine. All policies get the same requests: sessions with long prompts of new images, and chats with short ones, at the
rates that keep workers that do both busy to LOADS. `both`: each worker does all of a request. `split`: some compute all
prompts, the others generate. `auto`, the default: a prompt is computed where that delays requests least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import harness
from medialane.routing import RoutingConfig
from medialane.testing.simulated import SimulatedConfig
from medialane.types.request import WorkerRole
from simulated_cluster import CONFIG, SimulatedCluster
from traces import SessionTrace, Turn, session_turns

ABOUT = "simulated workers: prompts computed by workers of their own, and by those that generate"

LOADS, GUESS_PER_S = (0.7, 0.5, 0.35), 40.0
#: As many requests of each.
IMAGES = SessionTrace(
    num_images=50_000, zipf=0.0, images_of_first=(0.0, 0.0, 0.2, 0.8), more_images=0.5, answer=(50, 250)
)
CHATS = SessionTrace(num_images=1, images_of_first=(1.0,), more_images=0.0, answer=(100, 400))
#: Of workers that do both.
MAX_STALL, MIN_THROUGHPUT, MAX_TTFT = 0.5, 0.9, 4.0


class Policy(NamedTuple):
    name: str
    roles: Sequence[WorkerRole]
    prefill_at: Literal["auto", "prefill", "decode"] = "prefill"


def policies() -> list[Policy]:
    return [
        Policy("both", ("worker", "worker", "worker", "worker")),
        Policy("split", ("prefill", "prefill", "decode", "decode")),
        Policy("auto", ("prefill", "prefill", "decode", "decode"), "auto"),
    ]


def run(options: harness.Options) -> harness.Report:
    report = harness.Report("pd")
    num_turns = 300 if options.quick else 2000
    rate = GUESS_PER_S if options.quick else _rate(num_turns)
    for load in LOADS:
        rows = [_row(policy, num_turns, rate * load / LOADS[0]) for policy in policies()]
        report.tables[f"at {load:.0%}"] = rows
        report.bars += _bars(rows, f"at {load:.0%}")
    return report


def turns_of(num_turns: int, rate_per_s: float) -> list[Turn]:
    """Return the turns of both traces, by their times."""

    def named() -> Iterator[Turn]:
        for seed, trace in enumerate((IMAGES, CHATS)):
            half = trace._replace(seed=seed, num_turns=num_turns // 2, rate_per_s=rate_per_s / 2)
            yield from (turn._replace(session=f"{seed}-{turn.session}") for turn in session_turns(half))

    return sorted(named(), key=lambda turn: turn.time_s)


def _rate(num_turns: int) -> float:
    """Search for the rate that keeps workers that do both busy to the highest of LOADS."""
    low, high = 0.0, 4 * GUESS_PER_S
    for _ in range(7):
        middle = (low + high) / 2
        busy = float(str(_row(policies()[0], num_turns, middle)["busy"]))
        low, high = (middle, high) if busy < LOADS[0] else (low, middle)
    return low


def _row(policy: Policy, num_turns: int, rate_per_s: float) -> dict[str, object]:
    simulated = SimulatedConfig(num_kv_blocks=CONFIG.num_kv_blocks)
    config = RoutingConfig(
        encoder_ms_per_token=simulated.embedding_ms,
        prefill_ms_per_token=simulated.prefill_token_ms,
        transfer_ms_per_token=simulated.transfer_token_ms,
        prefill_at=policy.prefill_at,
    )
    turns = turns_of(num_turns, rate_per_s)
    cluster = SimulatedCluster(len(policy.roles), config, simulated=simulated, roles=policy.roles)
    found = cluster.run(turns)
    row: dict[str, object] = {
        "policy": policy.name,
        "requests/s": rate_per_s,
        "answered/s": len(turns) / found.last_end_s,
        "busy": found.utilisation,
        "imbalance": found.imbalance,
        "inter-token p50 ms": harness.percentile(found.gaps_s, 0.5) * 1e3,
        "inter-token p99 ms": harness.percentile(found.gaps_s, 0.99) * 1e3,
        "ttft p50 ms": harness.percentile(found.ttft_s, 0.5) * 1e3,
        "ttft p99 ms": harness.percentile(found.ttft_s, 0.99) * 1e3,
    }
    print(row, flush=True)
    return row


def _bars(rows: Sequence[dict[str, object]], label: str) -> list[harness.Bar]:
    of = {str(row["policy"]): row for row in rows}

    def ratio(policy: str, name: str) -> float:
        return float(str(of[policy][name])) / float(str(of["both"][name]))

    return [
        harness.Bar(f"{label}: inter-token p99 / both", ratio("auto", "inter-token p99 ms"), MAX_STALL, "at most"),
        harness.Bar(f"{label}: answers/s / both", ratio("auto", "answered/s"), MIN_THROUGHPUT, "at least"),
        harness.Bar(f"{label}: ttft p99 / both", ratio("auto", "ttft p99 ms"), MAX_TTFT, "at most"),
    ]
