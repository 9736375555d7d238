"""Who encodes new images: the workers, encoders, or either by cost; and what keeping embeddings is worth.

Simulated workers in virtual time (`simulated_cluster`), of a 7B model on one GPU each; a run does not depend on the
machine. All policies get the same requests.

`new images`: sessions in which no image is known, at the rate that keeps workers that encode themselves 80 % busy, for
several speeds of the encoder. `aggregated`: the workers encode, `encoders`: further workers that only encode do,
`auto`: by the gateway's own rule (`routing.cost`). `nothing kept` is `aggregated` without an arena for
embeddings. There are as many workers in all of these, so the rows with encoders have more GPUs; `equal GPUs` compares
eight GPUs with eight.

`sliding window`: a published setup. Each of 30 users sends 8 requests, one after the other, with the last five
screenshots: four repeat the previous request's, but at other positions, where no prefix cache finds them.

`arena of the session trace`: see `arena_hits`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import harness
from arena_hits import NUM_TURNS, arena_rows
from medialane.routing import EncodeCosts, RoutingConfig
from medialane.testing.simulated import SimulatedConfig
from medialane.types.feature import MediaSpan
from simulated_cluster import HOP_S, SimulatedCluster
from simulated_media import EncodeAt, KeepsEmbeddings
from traces import IMAGE_TOKEN, SessionTrace, Turn, session_turns

ABOUT = "simulated workers and encoders: who encodes new images, and what keeping embeddings is worth"

NUM_WORKERS = 8
#: Every session has images, and almost none is that of another.
NEW_IMAGES = SessionTrace(
    num_images=50_000, zipf=0.0, images_of_first=(0.0, 0.6, 0.3, 0.1), more_images=0.5, answer=(50, 250)
)
MAX_BEHIND, MAX_STALL = 1.05, 0.5
MIN_HITS = 1.01
#: Tolerance of the load, and the most runs that finding it may take.
CLOSE, _MAX_TRIES = 0.03, 10


class Case(NamedTuple):
    """Encoding time of an embedding, ms; requests/s at which the workers of `aggregated` are about 80 % busy; encoders
    that are then about as busy."""

    embedding_ms: float
    guess_per_s: float
    num_encoders: int


#: Half of and as fast as the prefill of a token of the 7B model, and slower. 0.04 is 41 ms for an image of 1024x768.
CASES = (Case(0.02, 245.0, 2), Case(0.04, 189.0, 3), Case(0.06, 143.0, 4))
JUDGED = CASES[1]
LOAD, LOW_LOAD = 0.8, 0.4
#: Numbers of GPUs of a group that has encoders among `NUM_WORKERS`.
EQUAL_GPUS = (5, 3)


class Policy(NamedTuple):
    name: str
    num_workers: int
    num_encoders: int
    encode_at: EncodeAt | None


def run(options: harness.Options) -> harness.Report:
    report = harness.Report("encode_sim")
    num_turns = 400 if options.quick else 2500
    for case in (JUDGED,) if options.quick else CASES:
        seeds = (1, 2) if case is JUDGED and not options.quick else (1,)
        traces = [trace_at(LOAD, case, num_turns, seed, is_searched=not options.quick) for seed in seeds]
        rows = compare(case, policies(case.num_encoders), traces)
        report.tables[f"new images at {LOAD:.0%}, {case.embedding_ms:g} ms/embedding"] = rows
        report.bars += auto_bars(rows, f"auto, {case.embedding_ms:g} ms/embedding")
        if case is not JUDGED:
            continue
        report.bars.append(_stall_bar(rows))
        report.tables[f"equal GPUs at {LOAD:.0%}"] = compare(case, equal_gpus(), traces[:1])
        slow = traces[0]._replace(rate_per_s=traces[0].rate_per_s * LOW_LOAD / LOAD)
        report.tables[f"new images at {LOW_LOAD:.0%}"] = compare(case, policies(case.num_encoders), [slow])
    report.tables["sliding window"] = sliding_window()
    _arena(report, 1000 if options.quick else NUM_TURNS)
    return report


def _arena(report: harness.Report, num_turns: int) -> None:
    rows = report.tables["arena of the session trace"] = arena_rows(num_turns)
    for pixels in dict.fromkeys(row["pixels"] for row in rows):
        ratios = [
            float(str(row["hit ratio"])) / float(str(row["hit ratio without embeddings"]))
            for row in rows
            if row["pixels"] == pixels
        ]
        name = f"arena's hit ratio, {pixels} pixels, of that without embeddings, worst size"
        report.bars.append(harness.Bar(name, min(ratios), MIN_HITS, "at least"))


def policies(num_encoders: int) -> list[Policy]:
    return [
        Policy("nothing kept", NUM_WORKERS, 0, None),
        Policy("aggregated", NUM_WORKERS, 0, "workers"),
        Policy("encoders", NUM_WORKERS, num_encoders, "encoders"),
        Policy("auto", NUM_WORKERS, num_encoders, "auto"),
    ]


def equal_gpus() -> list[Policy]:
    return [
        Policy("aggregated", NUM_WORKERS, 0, "workers"),
        Policy("encoders", *EQUAL_GPUS, "encoders"),
        Policy("auto", *EQUAL_GPUS, "auto"),
    ]


def trace_at(load: float, case: Case, num_turns: int, seed: int, *, is_searched: bool) -> SessionTrace:
    """Return the trace with the rate that keeps workers that encode themselves busy to `load`."""
    trace = NEW_IMAGES._replace(num_turns=num_turns, seed=seed)

    def measure(rate: float) -> float:
        row = _row(policies(0)[1], case, [trace._replace(rate_per_s=rate)])
        return float(str(row["workers busy"]))

    rate = find_rate(load, measure, case.guess_per_s) if is_searched else case.guess_per_s
    return trace._replace(rate_per_s=rate)


def find_rate(utilisation: float, measure: Callable[[float], float], guess: float) -> float:
    """Search for the rate at which `measure` gives this utilisation: queues grow long before all workers are busy."""
    low, high, rate = (0.0, 0.0), (math.inf, 1.0), guess
    for _ in range(_MAX_TRIES):
        measured = measure(rate)
        if abs(measured - utilisation) <= CLOSE:
            return rate
        if measured < utilisation:
            low = rate, measured
        else:
            high = rate, measured
        if high[0] == math.inf:
            rate *= utilisation / measured
        else:
            rate = low[0] + (high[0] - low[0]) * (utilisation - low[1]) / (high[1] - low[1])
    raise RuntimeError(f"no rate found that keeps the workers {utilisation:.0%} busy: {low} to {high}")


def compare(case: Case, compared: Sequence[Policy], traces: Sequence[SessionTrace]) -> list[dict[str, object]]:
    """Return a row for each policy, over the requests of all traces."""
    rows = []
    for policy in compared:
        rows.append(_row(policy, case, traces))
        print(rows[-1], flush=True)
    return rows


def _row(policy: Policy, case: Case, traces: Sequence[SessionTrace]) -> dict[str, object]:
    simulated, config = settings(case.embedding_ms)
    gaps: list[float] = []
    ttft: list[float] = []
    utilisation, at_encoders, num_new, encoder_share = 0.0, 0, 0, 0.0
    for trace in traces:
        turns = list(session_turns(trace))
        media = kept(policy, simulated, config)
        found = SimulatedCluster(policy.num_workers, config, simulated=simulated, media=media).run(turns)
        gaps += found.gaps_s
        ttft += found.ttft_s
        utilisation += found.utilisation / len(traces)
        if media is not None:
            at_encoders += media.num_at_encoders
            num_new += media.num_at_encoders + media.num_at_workers
            encoder_share += sum(media.encoder_work_s) / turns[-1].time_s / len(traces)
    return {
        "policy": policy.name,
        "workers": policy.num_workers,
        "encoders": policy.num_encoders,
        "requests/s": sum(trace.rate_per_s for trace in traces) / len(traces),
        "workers busy": utilisation,
        "encoders busy": encoder_share / max(1, policy.num_encoders),
        "at encoders": at_encoders / max(1, num_new),
        "inter-token p50 ms": harness.percentile(gaps, 0.5) * 1e3,
        "inter-token p99 ms": harness.percentile(gaps, 0.99) * 1e3,
        "ttft p50 ms": harness.percentile(ttft, 0.5) * 1e3,
        "ttft p99 ms": harness.percentile(ttft, 0.99) * 1e3,
    }


def settings(embedding_ms: float) -> tuple[SimulatedConfig, RoutingConfig]:
    """Return the simulated engine, and the gateway's settings that fit it."""
    simulated = SimulatedConfig(num_kv_blocks=60_000, embedding_ms=embedding_ms)
    config = RoutingConfig(
        encoder_ms_per_token=embedding_ms,
        prefill_ms_per_token=simulated.prefill_token_ms,
        load_ms_per_mib=simulated.load_ms_per_mib,
    )
    return simulated, config


def kept(policy: Policy, simulated: SimulatedConfig, config: RoutingConfig) -> KeepsEmbeddings | None:
    if policy.encode_at is None:
        return None
    return KeepsEmbeddings(policy.encode_at, policy.num_encoders, EncodeCosts.of(config), simulated, hop_s=HOP_S)


def auto_bars(rows: Sequence[dict[str, object]], label: str) -> list[harness.Bar]:
    of = {row["policy"]: row for row in rows}
    found = []
    for name in ("inter-token p99 ms", "ttft p50 ms", "ttft p99 ms"):
        auto, *others = (float(str(of[policy][name])) for policy in ("auto", "aggregated", "encoders"))
        ratio = auto / min(others)
        found.append(harness.Bar(f"{label}: {name[:-3]}, of the better policy's", ratio, MAX_BEHIND, "at most"))
    return found


def _stall_bar(rows: Sequence[dict[str, object]]) -> harness.Bar:
    of = {row["policy"]: row for row in rows}
    encoders, aggregated = (float(str(of[name]["inter-token p99 ms"])) for name in ("encoders", "aggregated"))
    return harness.Bar("encoders: inter-token p99, of aggregated's", encoders / aggregated, MAX_STALL, "at most")


# --- the sliding window of screenshots

NUM_USERS, NUM_WINDOW_TURNS, WINDOW, SCREENSHOT = 30, 8, 5, 1036


def sliding_window() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for num_workers in (1, 4):
        for policy in (Policy("nothing kept", num_workers, 0, None), Policy("aggregated", num_workers, 0, "workers")):
            simulated, config = settings(JUDGED.embedding_ms)
            cluster = SimulatedCluster(num_workers, config, simulated=simulated, media=kept(policy, simulated, config))
            found = cluster.run_users(screenshots())
            rows.append(
                {
                    "policy": policy.name,
                    "workers": num_workers,
                    "requests/s": len(found.ttft_s) / found.last_arrival_s,
                    "ttft p50 ms": harness.percentile(found.ttft_s, 0.5) * 1e3,
                    "ttft p90 ms": harness.percentile(found.ttft_s, 0.9) * 1e3,
                    "embeddings not encoded": found.not_encoded,
                }
            )
    for row, before in zip(rows, [rows[0], rows[0], rows[2], rows[2]], strict=True):
        for name in ("requests/s", "ttft p50 ms", "ttft p90 ms"):
            row[f"{name} / nothing kept"] = float(str(row[name])) / float(str(before[name]))
    return rows


def screenshots() -> dict[str, list[Turn]]:
    """Return the requests of each user: a system prompt of the user's own, the last five screenshots, a question."""
    drawn, users = random.Random(1), {}
    for user in range(NUM_USERS):
        head = [drawn.randrange(1000, 100_000) for _ in range(100)]
        images = [f"{drawn.getrandbits(256):064x}" for _ in range(NUM_WINDOW_TURNS + WINDOW)]
        turns = []
        for number in range(NUM_WINDOW_TURNS):
            tokens, media = list(head), []
            for mm_hash in images[number : number + WINDOW]:
                media.append(MediaSpan(mm_hash, len(tokens), SCREENSHOT, "image", SCREENSHOT))
                tokens += [*[IMAGE_TOKEN] * SCREENSHOT, 1000]
            tokens += [drawn.randrange(1000, 100_000) for _ in range(50)]
            turns.append(Turn(0.1 * user, f"u{user}", tokens, tuple(media), 100))
        users[f"u{user}"] = turns
    return users
