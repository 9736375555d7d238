"""Writes the dashboards beside it: python deploy/grafana/build.py

A panel is a title, a text, and queries with a legend each. What all panels have in common is here: selectors by the
variables of vLLM's own dashboards, names of the queried metrics at the end of each description, places on the grid.
A query that has no data until something has happened says so with `until`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

#: Begins the sentence about panels without data in the description; tests look for it.
UNTIL = "No data until "

ONE_SOURCE = """\
**Scrape each worker's series once.** A gateway exposes vLLM's series of *all* its workers (label `worker`), so sums are
right here if one source has them: one gateway port (with `--gateways N` any of them covers all), **not** the gateways
of several hosts that share workers, and **not** the workers' `--metrics-port` as well.
`deploy/prometheus/scrape.yaml` shows how to drop the rest. *Gateway*: what clients wait for. *Worker*: vLLM's own
times, which begin when the worker gets the prepared request. Each metric: `docs/reference/metrics.md`; alerts:
`docs/runbook.md`."""

_METRIC = re.compile(r"\b(?:vllm:|medialane_|http_|process_)\w+|\bup\b")
_PART = re.compile(r"_(?:bucket|sum|count)$")
_RATE = "[$__rate_interval]"

Query = tuple[str, str]


def of(name: str, *labels: str) -> str:
    """The selector of a series. Only vLLM's have the label model_name."""
    variables = ["job", *(["model_name"] if name.startswith("vllm:") else []), "instance"]
    selectors = [f'{each}=~"${each}"' for each in variables]
    return f"{name}{{{', '.join([*selectors, *labels])}}}"


def rate(name: str, *labels: str, by: str = "") -> str:
    return total(f"rate({of(name, *labels)}{_RATE})", by=by)


def total(inner: str, *, by: str = "") -> str:
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def quantile(q: float, name: str, *labels: str, by: str = "") -> str:
    buckets = f"rate({of(f'{name}_bucket', *labels)}{_RATE})"
    return f"histogram_quantile({q:g}, sum by ({', '.join(filter(None, ['le', by]))}) ({buckets}))"


def ratio(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


def mean(name: str, *labels: str, by: str = "") -> str:
    return ratio(rate(f"{name}_sum", *labels, by=by), rate(f"{name}_count", *labels, by=by))


def quantiles(name: str, *labels: str) -> list[Query]:
    found = [(quantile(q, name, *labels), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)]
    return [*found, (mean(name, *labels), "mean")]


@dataclass(frozen=True)
class Panel:
    """`until` completes `UNTIL`."""

    kind: str
    title: str
    text: str
    queries: Sequence[Query]
    unit: str = "short"
    until: str = ""
    width: int = 8
    height: int = 8
    steps: Sequence[tuple[str, float | None]] = (("blue", None),)
    stacked: bool = False
    most: float | None = None

    def json(self) -> dict[str, Any]:
        targets = [
            {"expr": expr, "legendFormat": legend, "refId": chr(ord("A") + i)}
            for i, (expr, legend) in enumerate(self.queries)
        ]
        return {
            "type": self.kind,
            "title": self.title,
            "description": self._description(),
            "datasource": _SOURCE,
            "targets": targets,
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": _STAT_OPTIONS if self.kind == "stat" else _GRAPH_OPTIONS,
        }

    def _description(self) -> str:
        names = dict.fromkeys(_PART.sub("", name) for expr, _ in self.queries for name in _METRIC.findall(expr))
        until = f" {UNTIL}{self.until}." if self.until else ""
        metrics = "Metric" if len(names) == 1 else "Metrics"
        return f"{self.text}{until}\n\n{metrics}: {', '.join(f'`{name}`' for name in names)}"

    def _defaults(self) -> dict[str, Any]:
        if self.kind == "stat":
            thresholds = [{"color": color, "value": value} for color, value in self.steps]
            nan = {"type": "special", "options": {"match": "nan", "result": {"index": 0, "text": "No traffic"}}}
            return {
                "color": {"mode": "thresholds"},
                "mappings": [nan],
                "noValue": "No data",
                "thresholds": {"mode": "absolute", "steps": thresholds},
                "unit": self.unit,
            }
        stacking = {"stacking": {"group": "A", "mode": "normal"}} if self.stacked else {}
        custom = {"fillOpacity": 25 if self.stacked else 10, "lineWidth": 1, "showPoints": "never", **stacking}
        bounds = {"min": 0} if self.most is None else {"min": 0, "max": self.most}
        return {"color": {"mode": "palette-classic"}, "custom": custom, "unit": self.unit, **bounds}


def stat(title: str, text: str, expr: str, unit: str = "short", *, steps: Any = None, until: str = "") -> Panel:
    found = Panel("stat", title, text, [(expr, "__auto")], unit, until, width=3, height=4)
    return found if steps is None else replace(found, steps=steps)


def graph(title: str, text: str, queries: Sequence[Query] | str, unit: str = "short", **more: Any) -> Panel:
    given = [(queries, "__auto")] if isinstance(queries, str) else queries
    return Panel("timeseries", title, text, given, unit, **more)


def at_most(warning: float, critical: float) -> list[tuple[str, float | None]]:
    return [("green", None), ("orange", warning), ("red", critical)]


def at_least(warning: float, good: float) -> list[tuple[str, float | None]]:
    return [("red", None), ("orange", warning), ("green", good)]


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_STAT_OPTIONS = {
    "colorMode": "value",
    "graphMode": "area",
    "justifyMode": "auto",
    "orientation": "auto",
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    "textMode": "value",
}
_GRAPH_OPTIONS = {
    "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
    "tooltip": {"mode": "multi", "sort": "desc"},
}

TTFT, VLLM_TTFT = "medialane_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"
REQUESTS = "medialane_request_seconds"
FAILED = 'status="5xx"'
STAGES = "medialane_stage_seconds"
ITEMS = "medialane_media_items_total"
LOOKUPS = "medialane_cache_lookups_total"
#: With figures of queues.
ENCODERS = "the deployment has encoders (`serve --encoders`)"
HOSTS = "workers of another host copy media"

Rows = Mapping[str, Sequence[Panel]]

OVERVIEW: Rows = {
    "": [
        stat(
            "Requests / s",
            "POST requests that have ended, also refused and failed ones.",
            rate(f"{REQUESTS}_count"),
            "reqps",
        ),
        stat(
            "5xx ratio",
            "Share of API requests answered with a 5xx status, refusals for lack of capacity (503) included."
            " Not labelled by model. Errors after a stream has begun are in *Errors by code*.",
            ratio(f"({rate('http_requests_total', FAILED)} or vector(0))", rate("http_requests_total")),
            "percentunit",
            steps=at_most(0.001, 0.01),
        ),
        stat(
            "TTFT p95, gateway",
            "Time to first token as clients see it, from a request's header at the gateway: with upload,"
            " media and queues.",
            quantile(0.95, TTFT),
            "s",
        ),
        stat(
            "TTFT p95, worker",
            "vLLM's own time to first token. It begins when the worker gets the prepared request.",
            quantile(0.95, VLLM_TTFT),
            "s",
        ),
        stat("Request p95", "From a request's header to the end of its response.", quantile(0.95, REQUESTS), "s"),
        stat(
            "Wait for engines",
            "How long requests wait for an engine, at the most loaded gateway. For autoscalers.",
            f"max({of('medialane_expected_wait_seconds')})",
            "s",
            steps=at_most(0.3, 3),
        ),
        stat(
            "Ready workers",
            "Workers that serve requests, encoders included.",
            f"""sum({of("medialane_worker_state", 'state="ready"')})""",
            steps=at_least(1, 1),
        ),
        stat(
            "Unreachable",
            "Scrape targets of the selected jobs that Prometheus cannot scrape.",
            'count(up{job=~"$job"} == 0) or vector(0)',
            steps=[("green", None), ("red", 1)],
        ),
        stat(
            "Media items / s",
            "Images, videos and audios of requests that have had a first token.",
            rate(ITEMS),
        ),
        stat(
            "Media cache hits",
            "Share of media items that were found prepared in shared memory.",
            ratio(rate(LOOKUPS, 'kind="feature"', 'outcome="hit"'), rate(LOOKUPS, 'kind="feature"')),
            "percentunit",
        ),
        stat(
            "Preparer queue",
            "Expected time of the items that wait for a preparer, at the most loaded host.",
            f"max({of('medialane_preparer_queue_seconds')})",
            "s",
            steps=at_most(1, 5),
        ),
        stat(
            "KV cache",
            "KV cache usage of the most loaded worker.",
            f"max({of('vllm:kv_cache_usage_perc')})",
            "percentunit",
            steps=at_most(0.9, 0.98),
        ),
        stat("Output tok/s", "Generated tokens per second.", rate("vllm:generation_tokens_total"), "count:tok/s"),
        stat(
            "TTFT SLO",
            "Share of requests whose time to first token at the gateway was within the *TTFT SLO* chosen above.",
            ratio(rate(f"{TTFT}_bucket", 'le="$ttft_slo"'), rate(f"{TTFT}_count")),
            "percentunit",
            steps=at_least(0.9, 0.99),
        ),
        stat(
            "TPOT SLO",
            "Share of finished requests whose mean time per output token was within the *TPOT SLO* chosen above.",
            ratio(
                rate("vllm:request_time_per_output_token_seconds_bucket", 'le="$tpot_slo"'),
                rate("vllm:request_time_per_output_token_seconds_count"),
            ),
            "percentunit",
            steps=at_least(0.9, 0.99),
        ),
        stat(
            "Arena in use",
            "Shared memory that cannot be evicted, at the fullest host.",
            f"""max(1 - sum without (kind) ({of("medialane_arena_bytes", 'kind=~"free|cached"')})"""
            f""" / sum without (kind) ({of("medialane_arena_bytes", 'kind="size"')}))""",
            "percentunit",
            steps=at_most(0.8, 0.95),
        ),
    ],
    "Latency: at the gateway and at the worker": [
        graph(
            "Time to first token, gateway",
            "From a request's header at the gateway: upload, media, queues, engine.",
            quantiles(TTFT),
            "s",
        ),
        graph(
            "Time to first token, worker",
            "vLLM's own: queue and prefill of the engine. Nothing that happened before the worker got the request.",
            quantiles(VLLM_TTFT),
            "s",
        ),
        graph(
            "What the worker's TTFT leaves out",
            "Mean time to first token at the gateway less that at the workers: upload,"
            " media, queues of the gateway, hand-over. Both means are of the requests of the interval, so short"
            " intervals are rough.",
            [
                (mean(TTFT), "gateway"),
                (mean(VLLM_TTFT), "worker"),
                (f"clamp_min({mean(TTFT)} - {mean(VLLM_TTFT)}, 0)", "before the worker"),
            ],
            "s",
        ),
        graph("Request duration", "From a request's header to the end of its response.", quantiles(REQUESTS), "s"),
        graph(
            "Inter-token latency",
            "Time between consecutive outputs of a stream, at the worker.",
            quantiles("vllm:inter_token_latency_seconds"),
            "s",
        ),
        graph(
            "Mean time by step",
            "fetch, decode and process are parts of store, first_token is transit, queue and prefill.",
            [(mean(STAGES, by="stage"), "{{stage}}")],
            "s",
        ),
    ],
    "Traffic": [
        graph(
            "Requests and tokens",
            "Requests that have ended, and tokens by source.",
            [
                (rate(f"{REQUESTS}_count"), "requests"),
                (rate("vllm:prompt_tokens_total"), "input tokens"),
                (rate("vllm:generation_tokens_total"), "output tokens"),
            ],
        ),
        graph(
            "Characters of prompts by the source of their tokens",
            "Of prompts with 256 or more: cached were tokenized for an earlier prompt, as a chat's earlier turns.",
            [(rate("medialane_prompt_characters_total", by="tokens"), "{{tokens}}")],
            stacked=True,
        ),
        graph(
            "HTTP responses by status",
            "API requests by class of status.",
            [(rate("http_requests_total", by="status"), "{{status}}")],
            "reqps",
            stacked=True,
        ),
        graph(
            "Finished requests by reason",
            "At the engines: stop, length, abort (the client left, or the request was migrated), error.",
            [(rate("vllm:request_success_total", by="finished_reason"), "{{finished_reason}}")],
            "reqps",
            stacked=True,
        ),
        graph(
            "Errors by code",
            "Requests that were refused or failed, by medialane's error code (docs/api.md).",
            [(rate("medialane_request_errors_total", by="code"), "{{code}}")],
            "reqps",
            stacked=True,
            until="a request has failed",
        ),
        graph(
            "Refusals by tenant and reason",
            "Requests refused by a tenant's limits or for lack of capacity; without `--keys` the tenant is empty.",
            [(rate("medialane_refused_requests_total", by="tenant, reason"), "{{tenant}} {{reason}}")],
            "reqps",
            stacked=True,
            until="a request has been refused",
        ),
        graph(
            "Lost workers and migrations",
            "Lost connections to workers, and what became of their requests.",
            [
                (f"sum by (outcome) (increase({of('medialane_migrations_total')}{_RATE}))", "{{outcome}}"),
                (f"sum by (worker) (increase({of('medialane_worker_losses_total')}{_RATE}))", "lost {{worker}}"),
            ],
            until="a worker has been lost",
        ),
    ],
    "Queues (for autoscalers)": [
        graph(
            "Wait for engines",
            "Of requests: in the gateway and at the worker with the shortest wait; and by worker, of the last request"
            " that has begun there while others wait.",
            [
                (f"max({of('medialane_expected_wait_seconds')})", "requests"),
                (f"max by (worker) ({of('medialane_worker_wait_seconds')})", "{{worker}}"),
            ],
            "s",
        ),
        graph(
            "Requests at engines",
            "Running and waiting, of all workers.",
            [(total(of("vllm:num_requests_running")), "running"), (total(of("vllm:num_requests_waiting")), "waiting")],
        ),
        graph(
            "Requests that wait in gateways",
            "For an engine, or for their media to be prepared.",
            [(total(of("medialane_queue_requests"), by="queue"), "{{queue}}")],
        ),
        graph(
            "Time in gateways' queues",
            "In which time all that waits will have been sent, by the pace of the last ones; how long the oldest has"
            " waited.",
            [
                (f"max by (queue) ({of('medialane_queue_seconds')})", "{{queue}}"),
                (f"max by (queue) ({of('medialane_queue_oldest_seconds')})", "{{queue}}, oldest"),
            ],
            "s",
        ),
        graph(
            "Items that wait for a preparer",
            "Expected time of the waiting items, and their number, by host.",
            [
                (of("medialane_preparer_queue_seconds"), "{{instance}}, seconds"),
                (of("medialane_preparer_queue"), "{{instance}}, items"),
            ],
        ),
    ],
}

MEDIA: Rows = {
    "Items": [
        graph(
            "Items by modality",
            "Items of requests that have had a first token; *cached*: all tokens were in the KV cache.",
            [(rate(ITEMS, by="modality, outcome"), "{{modality}} {{outcome}}")],
            stacked=True,
        ),
        graph(
            "Cache hits by kind",
            "Share of lookups of media items that hit: `feature` is the item as prepared for the model.",
            [(ratio(rate(LOOKUPS, 'outcome="hit"', by="kind"), rate(LOOKUPS, by="kind")), "{{kind}}")],
            "percentunit",
            most=1,
        ),
        graph(
            "vLLM's multimodal cache",
            "Items that vLLM's own processor cache in workers had, of those looked up there.",
            ratio(rate("vllm:mm_cache_hits_total"), rate("vllm:mm_cache_queries_total")),
            "percentunit",
            most=1,
            until="workers process media themselves (`--stage url`)",
        ),
        graph(
            "Errors of media",
            "Requests that failed because of their media, by error code.",
            [
                (
                    rate("medialane_request_errors_total", 'code=~".*(media|image|video|audio|fetch).*"', by="code"),
                    "{{code}}",
                )
            ],
            "reqps",
            stacked=True,
            until="a request has failed because of its media",
        ),
    ],
    "Preparation": [
        graph(
            "Fetch",
            "Time to fetch the slowest item of a request from its origin.",
            quantiles(STAGES, 'stage="fetch"'),
            "s",
            until="media have been fetched from URLs",
        ),
        graph("Decode", "Time to decode the slowest item of a request.", quantiles(STAGES, 'stage="decode"'), "s"),
        graph(
            "Process",
            "Time of the model's processor for the slowest item of a request.",
            quantiles(STAGES, 'stage="process"'),
            "s",
        ),
        graph(
            "Preparer queue",
            "Expected time of the waiting items, divided by the number of preparers. Scale preparers by it.",
            of("medialane_preparer_queue_seconds"),
            "s",
        ),
        graph(
            "Preparers",
            "Processes that are alive and busy, and items that wait for one.",
            [
                (total(of("medialane_preparers"), by="state"), "{{state}}"),
                (total(of("medialane_preparer_queue")), "waiting items"),
            ],
        ),
        graph(
            "Preparation jobs",
            "Jobs by outcome, and preparers that were restarted after a crash or a kill.",
            [
                (rate("medialane_preparer_jobs_total", by="outcome"), "{{outcome}}"),
                (rate("medialane_preparer_restarts_total"), "restarts"),
            ],
        ),
    ],
    "Shared memory": [
        graph(
            "Arena by state",
            "*cached* may be evicted; *pinned* is in use; *writing* is reserved.",
            [(total(of("medialane_arena_bytes", 'kind!="size"'), by="kind"), "{{kind}}")],
            "bytes",
            stacked=True,
        ),
        graph(
            "Arena by kind of entry",
            "Encoded files, decoded media, processed tensors, embeddings.",
            [(total(of("medialane_arena_media_bytes"), by="kind"), "{{kind}}")],
            "bytes",
            stacked=True,
        ),
        graph(
            "Entries, pins, evictions",
            "Entries, and pins on them, one for each reader; evictions per second.",
            [
                (total(of("medialane_arena_entries")), "entries"),
                (total(of("medialane_arena_leases")), "pins"),
                (rate("medialane_arena_evictions_total"), "evictions / s"),
            ],
        ),
        graph(
            "Media kept for clients",
            "Bytes of media that were sent once and are leased, and the limit (`--media-lease-share`).",
            [(total(of("medialane_store_leased_bytes"), by="kind"), "{{kind}}")],
            "bytes",
        ),
        graph(
            "Bytes copied in gateways",
            "Bytes of media and features that a gateway has copied; shared memory copies none.",
            rate("medialane_copied_bytes_total"),
            "Bps",
        ),
        graph(
            "Copies from other hosts",
            "Bytes of entries that this host's store has copied, and failed copies, by mover.",
            [
                (rate("medialane_store_pulled_bytes_total", by="mover"), "{{mover}}"),
                (rate("medialane_store_failed_pulls_total", by="mover"), "failed {{mover}}"),
            ],
            "Bps",
            until=HOSTS,
        ),
    ],
    "Encoder outputs": [
        graph(
            "What became of embeddings",
            "Items sent to workers that keep embeddings: loaded, encoded, unkept, unneeded (in"
            " the KV cache), fallback.",
            [(rate("medialane_embeddings_total", by="outcome"), "{{outcome}}")],
            stacked=True,
        ),
        graph(
            "Encoder time saved",
            "Expected seconds of encoder runs per second that loaded embeddings have avoided.",
            rate("medialane_encoder_saved_seconds_total"),
            "s",
        ),
        graph(
            "New items by encoder",
            "What became of new items while encoders were ready.",
            [(rate("medialane_encoder_requests_total", by="outcome"), "{{outcome}}")],
            stacked=True,
            until=ENCODERS,
        ),
        graph(
            "Embeddings in the store",
            "Found in shared memory, filled by an engine, dropped as none wrote them, waited for.",
            [(rate("medialane_store_embeddings_total", by="outcome"), "{{outcome}}")],
        ),
    ],
}

ROUTING: Rows = {
    "Decisions": [
        graph(
            "Duration of routing decisions",
            "Without hashing the prompt's blocks.",
            quantiles("medialane_routing_seconds"),
            "s",
        ),
        graph(
            "Cached prompt tokens, predicted and reported",
            "Share of prompt tokens that the router expected in the chosen"
            " worker's KV cache, and that its engine has found there.",
            [
                (
                    ratio(
                        rate("medialane_prompt_tokens_total", f'kind="{kind}_cached"'),
                        rate("medialane_prompt_tokens_total", 'kind="all"'),
                    ),
                    legend,
                )
                for kind, legend in (("routed", "predicted"), ("engine", "reported"))
            ],
            "percentunit",
            most=1,
        ),
        graph(
            "Missed predictions",
            "Prompts whose engines had fewer tokens cached than predicted, or more, and decisions whose request was"
            " never sent.",
            [
                (rate("medialane_routing_missed_predictions_total", by="kind"), "{{kind}}"),
                (rate("medialane_routing_unsent_decisions_total"), "unsent"),
            ],
        ),
        graph(
            "Prompts computed by other workers",
            "With `--prefill`: how many were split, or why not; and the prompt tokens"
            " that were read from such a worker, in thousands.",
            [
                (rate("medialane_prefills_total", by="outcome"), "{{outcome}}"),
                (rate("medialane_prompt_tokens_total", 'kind="transferred"') + " / 1000", "1000 tokens"),
            ],
            until="the deployment has prefill workers",
        ),
        graph(
            "Index",
            "KV blocks of all workers, distinct ones, and media items in encoder caches.",
            [
                (f"max({of('medialane_routing_entries')})", "entries"),
                (f"max({of('medialane_routing_blocks')})", "distinct"),
                (f"max({of('medialane_routing_encoder_items')})", "items in encoder caches"),
            ],
        ),
        graph(
            "KV events",
            "Age of a worker's latest KV event when it was reported, and times that a snapshot replaced queued events.",
            [
                (f"max by (worker) ({of('medialane_kv_event_lag_seconds')})", "{{worker}}"),
                (f"sum by (worker) (increase({of('medialane_kv_event_gaps_total')}{_RATE}))", "gaps of {{worker}}"),
            ],
            "s",
        ),
        graph(
            "Prefix cache hits by worker",
            "Share of prompt tokens looked up in the prefix cache that were found.",
            [
                (
                    ratio(
                        rate("vllm:prefix_cache_hits_total", by="worker"),
                        rate("vllm:prefix_cache_queries_total", by="worker"),
                    ),
                    "{{worker}}",
                )
            ],
            "percentunit",
            most=1,
        ),
    ],
    "Workers": [
        graph(
            "Wait by worker",
            "Of the last request that has begun in its engine, while others wait there.",
            [(f"max by (worker) ({of('medialane_worker_wait_seconds')})", "{{worker}}")],
            "s",
        ),
        graph(
            "Requests in flight by worker",
            "Requests that gateways have sent and that have not ended.",
            [(total(of("medialane_worker_in_flight"), by="worker"), "{{worker}}")],
        ),
        graph(
            "Running and waiting by worker",
            "As the engine reports them.",
            [
                (total(of("vllm:num_requests_running"), by="worker"), "{{worker}} running"),
                (total(of("vllm:num_requests_waiting"), by="worker"), "{{worker}} waiting"),
            ],
        ),
        graph(
            "KV cache by worker",
            "Usage of the KV cache.",
            [(f"max by (worker) ({of('vllm:kv_cache_usage_perc')})", "{{worker}}")],
            "percentunit",
            most=1,
        ),
        graph(
            "TTFT p95 by worker",
            "vLLM's own: from when the worker got the request. A slow worker stands out.",
            [(quantile(0.95, VLLM_TTFT, by="worker"), "{{worker}}")],
            "s",
        ),
        graph(
            "Requests by worker",
            "Requests that have finished at each worker.",
            [(rate("vllm:request_success_total", by="worker"), "{{worker}}")],
            "reqps",
            stacked=True,
        ),
    ],
    "Hand-over": [
        graph(
            "Workers by transport",
            "How media reach connected workers: shared memory, a copy by the worker's store, inline.",
            [(total(of("medialane_worker_transport"), by="transport"), "{{transport}}")],
            stacked=True,
        ),
        graph("Hand-over", "Time to hand media over to the worker.", quantiles(STAGES, 'stage="handover"'), "s"),
        graph(
            "Fallbacks",
            "Hand-overs that failed and fell back to another path, by path and reason.",
            [(rate("medialane_transfer_fallbacks_total", by="path, reason"), "{{path}} {{reason}}")],
            stacked=True,
            until="a hand-over has failed",
        ),
    ],
}

HOSTS_ROWS: Rows = {
    "Gateways": [
        graph(
            "CPU of gateways",
            "A gateway is one event loop: near 1 it needs another (`--gateways`).",
            [(f"rate({of('process_cpu_seconds_total')}{_RATE})", "{{instance}} {{gateway}}")],
            "percentunit",
        ),
        graph(
            "Gateways that respond",
            "Of one port (`--gateways N`): 0 is one whose last values are exposed.",
            [(of("medialane_gateway_up"), "{{instance}} {{gateway}}")],
            most=1,
            until="several gateways share a port",
        ),
        graph(
            "Open files of gateways",
            "Descriptors of the gateway's process.",
            [(of("process_open_fds"), "{{instance}} {{gateway}}")],
        ),
        graph(
            "Connections to workers",
            "1 for a worker that the gateway is connected to.",
            [(of("medialane_worker_connected"), "{{instance}} {{gateway}} {{worker}}")],
            most=1,
        ),
    ],
    "Memory": [
        graph(
            "Memory by kind of process",
            "Proportional set size; shared memory is left out (*Arena*).",
            [(total(of("medialane_process_memory_bytes"), by="kind"), "{{kind}}")],
            "bytes",
            stacked=True,
        ),
        graph(
            "Memory by worker",
            "Front end and engine of each worker.",
            [(total(of("medialane_process_memory_bytes", 'worker!=""'), by="worker"), "{{worker}}")],
            "bytes",
            stacked=True,
        ),
        graph(
            "Arena",
            "Shared memory by state, of each host.",
            [(of("medialane_arena_bytes", 'kind!="size"'), "{{instance}} {{kind}}")],
            "bytes",
            stacked=True,
        ),
    ],
    "Workers": [
        graph(
            "Workers by state",
            "Ready, stalled (the engine does not respond) and lost ones.",
            [(total(of("medialane_worker_state"), by="state"), "{{state}}")],
            stacked=True,
        ),
        graph(
            "Workers by role",
            "Workers and encoders.",
            [(total(of("medialane_worker_role"), by="role"), "{{role}}")],
            stacked=True,
        ),
        graph(
            "Workers that keep embeddings",
            "1 for a worker that keeps its encoder's outputs, 0 and the reason for another.",
            [(of("medialane_worker_keeps_embeddings"), "{{worker}} {{reason}}")],
            most=1,
        ),
        graph(
            "Requests running",
            "In each worker's engine, as last reported to the gateways.",
            [(of("medialane_worker_running"), "{{worker}}")],
            stacked=True,
        ),
        graph(
            "Preemptions",
            "Running requests evicted per second to free KV cache, by worker.",
            [(rate("vllm:num_preemptions_total", by="worker"), "{{worker}}")],
        ),
        graph(
            "Tokens per engine step",
            "Mean tokens of prefill and decode per step, by worker.",
            [(mean("vllm:iteration_tokens_total", by="worker"), "{{worker}}")],
            "count:tok",
        ),
    ],
    "Stores": [
        graph(
            "Preparers", "Processes by state, of each host.", [(of("medialane_preparers"), "{{instance}} {{state}}")]
        ),
        graph(
            "Restarts of preparers",
            "After a crash or a kill; not those recycled as scheduled. Also of the fork servers that they come from.",
            [
                (f"increase({of('medialane_preparer_restarts_total')}{_RATE})", "{{instance}} preparers"),
                (f"increase({of('medialane_forkserver_restarts_total')}{_RATE})", "{{instance}} fork servers"),
            ],
        ),
        graph(
            "Exits of processes",
            "Of the processes of `serve`, by cause: exited, or hung and were killed for it.",
            [(f"increase({of('medialane_process_exits_total')}{_RATE})", "{{instance}} {{process}} {{cause}}")],
            until="a process has ended",
        ),
        graph(
            "Quarantined ranges",
            "Ranges that a failed copy may still write to.",
            of("medialane_store_quarantined_ranges"),
        ),
    ],
}

DASHBOARDS: Mapping[str, tuple[str, str, Rows]] = {
    "overview": (
        "Overview",
        "What clients wait for, at the gateway and at the workers. Scrape one source only: see the text on the page.",
        OVERVIEW,
    ),
    "media": ("Media", "Fetching, preparing and caching images, videos and audio; encoder outputs.", MEDIA),
    "routing": ("Routing", "Why workers are chosen, whether predictions come true, and how media reach them.", ROUTING),
    "hosts": ("Hosts", "Gateways, stores, workers and their memory.", HOSTS_ROWS),
}


def _placed(rows: Rows, *, note: str) -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    if note:
        number, y = 1, 4
        options = {"mode": "markdown", "content": note}
        grid = {"h": 4, "w": 24, "x": 0, "y": 0}
        yield {"type": "text", "title": "", "options": options, "gridPos": grid, "id": number}
    for title, panels in rows.items():
        if title:
            number += 1
            grid = {"h": 1, "w": 24, "x": 0, "y": y}
            yield {"type": "row", "title": title, "collapsed": False, "gridPos": grid, "id": number, "panels": []}
            y += 1
        x = 0
        for panel in panels:
            if x + panel.width > 24:
                x, y = 0, y + panel.height
            number += 1
            grid = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            yield {**panel.json(), "gridPos": grid, "id": number}
            x += panel.width
        y += panels[-1].height


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": query,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "includeAll": True,
        "multi": True,
        "hide": 0,
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
    }


def _threshold(name: str, label: str, seconds: Iterable[float], chosen: float) -> dict[str, Any]:
    """A choice of bucket boundaries, written as Prometheus writes them: 1.0."""
    texts = {f"{s * 1000:g}ms" if s < 1 else f"{s:g}s": str(float(s)) for s in seconds}
    options = [{"text": text, "value": value, "selected": value == str(chosen)} for text, value in texts.items()]
    return {
        "name": name,
        "label": label,
        "type": "custom",
        "query": ", ".join(f"{text} : {value}" for text, value in texts.items()),
        "options": options,
        "current": next(option for option in options if option["selected"]),
        "includeAll": False,
        "multi": False,
        "hide": 0,
    }


def variables() -> list[dict[str, Any]]:
    running = 'vllm:num_requests_running{job=~"$job"}'
    # Jobs of other hosts have no series of vLLM.
    ours = '__name__=~"vllm:num_requests_running|medialane_request_seconds_count|medialane_preparers"'
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {},
              "hide": 0, "includeAll": False, "multi": False, "options": [], "refresh": 1, "regex": ""}  # fmt: skip
    return [
        source,
        _variable("job", "Job", f"label_values({{{ours}}}, job)"),
        _variable("model_name", "Model", f"label_values({running}, model_name)"),
        _variable("instance", "Instance", f'label_values({{{ours}, job=~"$job"}}, instance)'),
        _threshold("ttft_slo", "TTFT SLO", (0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10), 1.0),
        _threshold("tpot_slo", "TPOT SLO", (0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5), 0.1),
        {"name": "filters", "label": "Filters", "type": "adhoc", "datasource": _SOURCE, "filters": [], "hide": 0},
    ]


def dashboard(name: str) -> dict[str, Any]:
    title, description, rows = DASHBOARDS[name]
    link = {"title": "vLLM dashboards", "type": "dashboards", "tags": ["vllm"], "icon": "external link",
            "asDropdown": False, "includeVars": True, "keepTime": True, "targetBlank": False}  # fmt: skip
    return {
        "title": f"medialane / {title}",
        "uid": f"medialane-{name}",
        "description": description,
        "tags": ["vllm", "medialane"],
        "links": [link],
        "panels": list(_placed(rows, note=ONE_SOURCE if name == "overview" else "")),
        "templating": {"list": variables()},
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "graphTooltip": 1,
        "schemaVersion": 39,
        "editable": True,
        "id": None,
        "version": 1,
    }


def text(name: str) -> str:
    """The file of a dashboard."""
    return json.dumps(dashboard(name), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(text(each))
