"""Alerts by the faults that they name: promtool lets each fault last for half an hour, after half an hour without one.

That the series are those of real gateways is compared here by their names, and by tests/e2e/test_e2e_metrics.py with a
Prometheus that has scraped them.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import metric_reference

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yaml"
#: Minutes of each half, and when alerts are looked at in both.
HALF, BEFORE, DURING = 30, 29, 57
#: Series of a gateway and two workers without a fault: what a minute adds to a counter, or the value of a gauge.
COUNTERS = {
    'http_requests_total{status="2xx"}': 1000,
    'http_requests_total{status="5xx"}': 0,
    'medialane_worker_losses_total{worker="w0"}': 0,
    "medialane_request_seconds_count": 1000,
    **{f'medialane_time_to_first_token_seconds_bucket{{le="{le}"}}': 1000 for le in ("1", "10", "20", "40", "+Inf")},
    'vllm:num_preemptions_total{worker="w0"}': 0,
    "vllm:prefix_cache_hits_total": 50,
    "vllm:prefix_cache_queries_total": 100,
    'medialane_encoder_requests_total{outcome="encoded"}': 20,
    'medialane_encoder_requests_total{outcome="late"}': 0,
    "medialane_preparer_restarts_total": 0,
    'medialane_transfer_fallbacks_total{path="shm",reason="arena_full"}': 0,
}
GAUGES = {
    "up": 1,
    'medialane_gateway_up{gateway="g0"}': 1,
    'medialane_gateway_up{gateway="g1"}': 1,
    **{f'medialane_worker_state{{worker="{name}",state="ready"}}': 1 for name in ("w0", "w1")},
    **{f'medialane_worker_state{{worker="{name}",state="stalled"}}': 0 for name in ("w0", "w1")},
    **{f'medialane_worker_role{{worker="{name}",role="worker"}}': 1 for name in ("w0", "w1")},
    **{
        f'medialane_arena_bytes{{kind="{kind}"}}': size for kind, size in (("size", 100), ("pinned", 5), ("cached", 95))
    },
    "medialane_expected_wait_seconds": 0.01,
    'vllm:num_requests_waiting{worker="w0"}': 1,
    'medialane_queue_oldest_seconds{queue="engine"}': 0.1,
    'vllm:kv_cache_usage_perc{worker="w0"}': 0.5,
    "medialane_preparer_queue_seconds": 0.1,
    "medialane_store_quarantined_ranges": 0,
}
#: The series are missing.
GONE = "stale"
_TTFT = "medialane_time_to_first_token_seconds_bucket"
_READY = [f'medialane_worker_state{{worker="{name}",state="ready"}}' for name in ("w0", "w1")]
_STATES = [name for name in GAUGES if name.startswith("medialane_worker_")]
_ARENA = [name for name in GAUGES if name.startswith("medialane_arena_bytes")]
#: What differs while a fault lasts, and all alerts that then fire.
FAULTS = {
    "half of the requests fail": (
        {'http_requests_total{status="5xx"}': 1000},
        {"ErrorRateCritical", "ErrorRate", "AvailabilityBurn"},
    ),
    "of 50 requests one fails": ({'http_requests_total{status="5xx"}': 20}, {"ErrorRate", "AvailabilityBurn"}),
    "of 200 requests one fails": ({'http_requests_total{status="5xx"}': 5}, {"AvailabilityBurn"}),
    "the gateway's process is gone": (dict.fromkeys({**COUNTERS, **GAUGES}, GONE) | {"up": 0}, {"TargetDown"}),
    "a gateway of the port does not respond": ({'medialane_gateway_up{gateway="g1"}': 0}, {"GatewayDown"}),
    "all workers are stalled": (dict.fromkeys(_READY, 0), {"NoWorkerReady", "WorkerNotReady"}),
    "all workers are lost and forgotten": (dict.fromkeys(_STATES, GONE), {"NoWorkerReady"}),
    "a worker is stalled": ({_READY[1]: 0}, {"WorkerNotReady"}),
    "a worker ends every two minutes": ({'medialane_worker_losses_total{worker="w0"}': 0.5}, {"WorkerLosses"}),
    "the store is gone": (dict.fromkeys(_ARENA, GONE), {"StoreMissing"}),
    "first tokens take half a minute": (
        {f'{_TTFT}{{le="{le}"}}': 0 for le in ("1", "10", "20")},
        {"TtftCritical", "Ttft"},
    ),
    "first tokens take a quarter of a minute": ({f'{_TTFT}{{le="{le}"}}': 0 for le in ("1", "10")}, {"Ttft"}),
    "engines have more than they can do": ({"medialane_expected_wait_seconds": 0.5}, {"ExpectedWait"}),
    "requests queue in an engine": ({'vllm:num_requests_waiting{worker="w0"}': 80}, {"RequestsWaiting"}),
    "the gateway's queue does not move": ({'medialane_queue_oldest_seconds{queue="engine"}': 25}, {"QueueStuck"}),
    "long sequences fill the KV cache": ({'vllm:kv_cache_usage_perc{worker="w0"}': 0.97}, {"KvCacheFull"}),
    "sequences are preempted": ({'vllm:num_preemptions_total{worker="w0"}': 120}, {"Preemptions"}),
    "prompts have nothing in common": ({"vllm:prefix_cache_hits_total": 5}, {"PrefixHitsLow"}),
    "encoders are late": ({'medialane_encoder_requests_total{outcome="late"}': 20}, {"EncodersFail"}),
    "preparers have more than they can do": ({"medialane_preparer_queue_seconds": 9}, {"PreparerQueue"}),
    "preparers crash": ({"medialane_preparer_restarts_total": 1}, {"PreparerRestarts"}),
    "the arena is full of what is in use": ({'medialane_arena_bytes{kind="pinned"}': 95}, {"ArenaFull"}),
    "workers do not map the arena": (
        {'medialane_transfer_fallbacks_total{path="shm",reason="arena_full"}': 20},
        {"TransferFallbacks"},
    ),
    "copies from another host hang": ({"medialane_store_quarantined_ranges": 2}, {"Quarantine"}),
}


def labelled(series):
    """As a gateway's page is scraped."""
    name, _, labels = series.partition("{")
    return f'{name}{{job="medialane",instance="g:8000",{labels or "}"}'


def values(series, fault):
    """Half an hour without, and half an hour with the fault, in promtool's notation."""
    is_gauge = series in GAUGES
    begin, healthy = (GAUGES[series], 0) if is_gauge else (0, COUNTERS[series])
    during = f"{fault}+0x{HALF}" if is_gauge else f"{healthy * HALF}+{fault}x{HALF}"
    return f"{begin}+{healthy}x{HALF - 1} {GONE if fault == GONE else during}"


def firing(minute, alerts):
    expr = 'group by (alertname) (ALERTS{alertstate="firing"})'
    samples = [{"labels": f'{{alertname="Medialane{name}"}}', "value": 1} for name in sorted(alerts)]
    return {"expr": expr, "eval_time": f"{minute}m", "exp_samples": samples}


def trial(name, fault, alerts):
    healthy = {**COUNTERS, **GAUGES}
    assert fault.keys() <= healthy.keys(), name
    return {
        "name": name,
        "interval": "1m",
        "input_series": [
            {"series": labelled(series), "values": values(series, fault.get(series, healthy[series]))}
            for series in healthy
        ],
        "promql_expr_test": [firing(BEFORE, ()), firing(DURING, alerts)],
    }


@pytest.mark.timeout(60)
@pytest.mark.skipif(shutil.which("promtool") is None, reason="NOT TESTED: promtool is not installed (make programs)")
def test_each_alert_fires_by_its_fault_and_no_other_does(tmp_path):
    trials = [trial(name, *fault) for name, fault in FAULTS.items()]
    file = tmp_path / "faults.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": trials}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_each_alert_has_a_fault():
    rules = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert {f"Medialane{name}" for _, alerts in FAULTS.values() for name in alerts} == set(rules)


def test_series_of_the_faults_are_ours():
    known = {metric_reference.shown_name(each) for found in metric_reference.families().values() for each in found}
    ours = {series.partition("{")[0] for series in {**COUNTERS, **GAUGES} if series.startswith("medialane_")}
    assert {re.sub("_(count|bucket)$", "", name) for name in ours} <= known
