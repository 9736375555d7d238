"""What vLLM's dashboard `vLLM / Overview` asks Prometheus: series, labels and the form of its queries.

As of vLLM 0.32, examples/observability/dashboards/grafana/vllm_overview.json.
"""

from collections.abc import Callable, Iterator
from itertools import chain

VARIABLES = 'job=~"$job", model_name=~"$model_name", instance=~"$instance"'
_SERVER = 'job=~"$job", instance=~"$instance"'
_QUANTILES = ("0.5", "0.95", "0.99")

_COUNTERS = ("request_success", "prompt_tokens", "generation_tokens", "num_preemptions")
_HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "iteration_tokens_total",
    "request_prompt_tokens",
    "request_generation_tokens",
)
_PHASES = ("queue", "prefill", "decode")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_HIT_RATES = ("prefix_cache", "external_prefix_cache", "mm_cache")
_GROUPED = (
    ("request_success", "finished_reason"),
    ("prompt_tokens", "model_name"),
    ("generation_tokens", "model_name"),
)

#: Series without data in plain vLLM, too, until they are used: a KV connector; vLLM's own processing of media.
CONDITIONAL = ("vllm:external_prefix_cache", "vllm:mm_cache")


def _of(name: str, *more: str) -> str:
    variables = VARIABLES if name.startswith("vllm:") else _SERVER
    return f"{name}{{{', '.join((variables, *more))}}}"


def _rate(name: str, *more: str, by: str = "", over: str = "$__rate_interval") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({_of(name, *more)}[{over}]))"


def _share(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


def _quantile(q: str, name: str, *, by: str = "le", over: str = "$__rate_interval") -> str:
    return f"histogram_quantile({q}, {_rate(f'{name}_bucket', by=by, over=over)})"


def _mean(name: str, *, by: str = "") -> str:
    return _share(_rate(f"{name}_sum", by=by), _rate(f"{name}_count", by=by))


def _latencies() -> Iterator[str]:
    for name in (f"vllm:{each}" for each in _HISTOGRAMS):
        yield from (_quantile(q, name) for q in _QUANTILES)
        yield _mean(name)
        yield _rate(f"{name}_bucket", by="le")
    yield from (_mean(f"vllm:request_{phase}_time_seconds") for phase in _PHASES)
    for name, slo in (("time_to_first_token_seconds", "ttft"), ("request_time_per_output_token_seconds", "tpot")):
        yield _share(_rate(f"vllm:{name}_bucket", f'le="${slo}_slo"'), _rate(f"vllm:{name}_count"))
    for name in ("request_prompt_tokens", "request_generation_tokens"):
        buckets, count = (f"increase({_of(f'vllm:{name}_{part}')}[$__range])" for part in ("bucket", "count"))
        yield f"sum by (le) ({buckets}) / on () group_left () (sum({count}) > 0)"


def _load() -> Iterator[str]:
    yield from (_rate(f"vllm:{name}_total") for name in _COUNTERS)
    yield from (_rate(f"vllm:{name}_total", by=by) for name, by in _GROUPED)
    running, usage = _of("vllm:num_requests_running"), _of("vllm:kv_cache_usage_perc")
    yield from (f"count({running})", f"sum({running})", f"sum({_of('vllm:num_requests_waiting')})")
    yield from (f"{each}({usage})" for each in ("max", "avg", "min"))
    for reason in ("capacity", "deferred"):
        label = f'reason="{reason}"'
        yield f"sum({_of('vllm:num_requests_waiting_by_reason', label)})"
    for cache in _HIT_RATES:
        yield _share(_rate(f"vllm:{cache}_hits_total"), _rate(f"vllm:{cache}_queries_total"))
    for source in _SOURCES:
        yield _rate("vllm:prompt_tokens_by_source_total", f'source="{source}"')


def _models() -> Iterator[str]:
    """The table of models, over the dashboard's time range."""
    over, by = "$__range", "model_name"
    running = f"last_over_time({_of('vllm:num_requests_running')}[{over}])"
    yield f"count by (model_name) (group by (model_name, instance) ({running}))"
    finished = "vllm:request_success_total"
    yield from (_rate(name, by=by, over=over) for name in (finished, "vllm:generation_tokens_total"))
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        yield _quantile("0.95", f"vllm:{name}", by="le, model_name", over=over)
    failed = _rate(finished, 'finished_reason="error"', by=by, over=over)
    yield _share(failed, _rate(finished, by=by, over=over))
    yield f"max by (model_name) (max_over_time({_of('vllm:kv_cache_usage_perc')}[{over}]))"
    yield f"round(sum by (model_name) (increase({_of('vllm:num_preemptions_total')}[{over}])))"
    shares = _rate(finished, by="finished_reason"), _rate(finished)
    yield f"{shares[0]} / ignoring (finished_reason) group_left () ({shares[1]} > 0)"


def _api_server() -> Iterator[str]:
    failed, every = _rate("http_requests_total", 'status="5xx"'), _rate("http_requests_total")
    yield _share(f"({failed} or vector(0))", every)
    yield from (_rate("http_requests_total", by=by) for by in ("status", "handler"))
    yield _mean("http_request_duration_seconds", by="handler")
    yield 'count(up{job=~"$job"} == 0) or vector(0)'


_ROWS: tuple[Callable[[], Iterator[str]], ...] = (_latencies, _load, _models, _api_server)
QUERIES: tuple[str, ...] = tuple(chain.from_iterable(row() for row in _ROWS))
