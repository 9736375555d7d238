"""Many gateways and workers: event traffic, state and CPU of a gateway, and the quality of its decisions.

In virtual time (`simulated_cluster`) with the gateways' own code, whose CPU time is measured. Every gateway receives
the KV events of all workers and the requests of all other gateways, so its cost has a part that grows with the requests
of the whole cluster. `limit` is the rate at which that part alone fills a gateway's core.

Traces are short (`trace s` of virtual time), so that all cases together take less than eight minutes of CPU. They begin
with new sessions only, whose follow-ups come after four seconds or more: fewer requests arrive (`arrivals/s`) than at
the rate for which `core share` is computed (`requests/s`), they share mostly system prompts and images, and caches are
colder than in `bench routing`.

The second table is no simulation: the gateway's own pool, links, router and request path, over real sockets, to workers
that another process plays (`connected_workers`): what load reports and requests cost in CPU, by the number of workers.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence

import connected_workers
import harness
from bench_routing import oracle
from medialane.routing import RoutingConfig
from simulated_cluster import SimulatedCluster
from traces import SessionTrace, Turn, session_turns
from traffic_meter import TrafficMeter

ABOUT = "1 to 16 gateways over up to 1000 simulated workers: event traffic, state, CPU, decision quality"

#: Workers -> requests of a trace.
SIZES = {64: 5000, 256: 6000, 1000: 8000}
NUM_GATEWAYS = (1, 4, 16)
#: Requests per second of one worker: `bench routing` at high load.
PER_WORKER_PER_S = 13.0
#: The share of a gateway's core that messages about others' requests may take at 256 workers and 4 gateways.
MAX_SHARE = 0.5
BUSY = (256, 4)
#: How much of the prefix that one gateway finds in caches the others' gateways must find together.
MIN_QUALITY = 0.97
TABLE = "traffic and cost of one gateway; quality"
#: Load reports a second that a busy worker sends (measured; changes within 20 ms are sent together), and requests a
#: second of the gateway, in the second table.
REPORTS_PER_S, REQUESTS_PER_S = 27.0, 500.0
MEASURED_WORKERS = (1, 64, 256, 1000)
MAX_CORES = 0.5
MEASURED = "CPU of one gateway, real links: load reports and requests"
#: Gateways connect before the first request; those messages are not counted.
_START_S = 1.0

Row = dict[str, object]


def run(options: harness.Options) -> harness.Report:
    sizes = {16: 500} if options.quick else SIZES
    counts = NUM_GATEWAYS[:2] if options.quick else NUM_GATEWAYS
    found = report([row for workers, turns in sizes.items() for row in measure(workers, turns, counts)])
    _measure_links(found, MEASURED_WORKERS[:2] if options.quick else MEASURED_WORKERS, 2 if options.quick else 10)
    return found


def _measure_links(found: harness.Report, sizes: Sequence[int], seconds: float) -> None:
    rows: list[Row] = []
    for num_workers in sizes:
        with tempfile.TemporaryDirectory(prefix="medialane-bench-") as folder:
            idle, busy = (
                connected_workers.measure(
                    f"{folder}/{requests}", num_workers, reports=REPORTS_PER_S, requests=requests, seconds=seconds
                )
                for requests in (0.0, REQUESTS_PER_S)
            )
        rows.append(
            {
                "workers": num_workers,
                "reports/s": busy.reports_per_s,
                "requests/s": busy.requests_per_s,
                "us/report": idle.cores / idle.reports_per_s * 1e6,
                "us/request": (busy.cores - idle.cores * busy.reports_per_s / idle.reports_per_s)
                / busy.requests_per_s
                * 1e6,
                "cores of reports": idle.cores,
                "cores": busy.cores,
            }
        )
        sent = busy.reports_per_s / REPORTS_PER_S / num_workers
        found.bars.append(harness.Bar(f"{num_workers} workers: reports sent, of the rate", sent, 0.97, "at least"))
    found.tables[MEASURED] = rows
    most = float(str(rows[-1]["cores"]))
    found.bars.append(harness.Bar(f"{sizes[-1]} workers: cores, reports and requests", most, MAX_CORES, "at most"))


def report(rows: list[Row]) -> harness.Report:
    found = harness.Report("scale", tables={TABLE: rows})
    for row in rows:
        if (row["workers"], row["gateways"]) == BUSY:
            share = float(str(row["core share"]))
            found.bars.append(harness.Bar("core share of a gateway for events", share, MAX_SHARE, "at most"))
    worst = min(float(str(row["cached of 1 gateway"])) for row in rows)
    found.bars.append(harness.Bar("cached tokens, of one gateway's, worst case", worst, MIN_QUALITY, "at least"))
    return found


def measure(num_workers: int, num_turns: int, num_gateways: Sequence[int] = NUM_GATEWAYS) -> list[Row]:
    """Return a row for each number of gateways, with the same trace. The first number is 1."""
    trace = SessionTrace(
        rate_per_s=PER_WORKER_PER_S * num_workers,
        num_turns=num_turns,
        num_system_prompts=12 * math.ceil(num_workers / 8),
        num_images=250 * num_workers,
    )
    turns = [turn._replace(time_s=turn.time_s + _START_S) for turn in session_turns(trace)]
    best = oracle(turns)
    rows = [_row(num_workers, count, turns, best) for count in num_gateways]
    for row in rows:
        row["cached of 1 gateway"] = float(str(row["cached of oracle"])) / float(str(rows[0]["cached of oracle"]))
    return rows


def _row(num_workers: int, num_gateways: int, turns: list[Turn], best: float) -> Row:
    meter, started = TrafficMeter(), time.process_time()
    cluster = SimulatedCluster(num_workers, RoutingConfig(), num_gateways=num_gateways, meter=meter)
    cluster.loop.call_at(_START_S / 2, meter.clear)
    outcome = cluster.run(turns)
    index = cluster.gateways[0].router.index
    per_request = 1 / len(turns) / num_gateways
    rate, trace_s = PER_WORKER_PER_S * num_workers, turns[-1].time_s - _START_S
    received_s = meter.received_s * per_request
    return {
        "workers": num_workers,
        "gateways": num_gateways,
        "requests/s": rate,
        "messages/request": meter.num_messages.total() * per_request,
        "KiB/request": meter.num_bytes.total() * per_request / 1024,
        "pending KiB/request": (meter.num_bytes["Pending"] + meter.num_bytes["PendingEnded"]) * per_request / 1024,
        "us/request": received_s * 1e6,
        "core share": received_s * rate,
        "limit requests/s": 1 / received_s,
        "index blocks": index.num_entries,
        "decision p50 us": harness.percentile(meter.decisions_s, 0.5) * 1e6,
        "decision p99 us": harness.percentile(meter.decisions_s, 0.99) * 1e6,
        "cached of oracle": outcome.cached / best,
        "ttft p50 ms": harness.percentile(outcome.ttft_s, 0.5) * 1e3,
        "ttft p99 ms": harness.percentile(outcome.ttft_s, 0.99) * 1e3,
        "trace s": trace_s,
        "arrivals/s": len(turns) / trace_s,
        "CPU s": time.process_time() - started,
    }
