"""Dashboards, alerts and scrape jobs of deploy/, and the reference of metrics."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

import metric_reference
from medialane.observability import Metrics

ROOT = Path(__file__).parents[2]
GRAFANA, PROMETHEUS = ROOT / "deploy" / "grafana", ROOT / "deploy" / "prometheus"
DASHBOARDS = sorted(GRAFANA.glob("*.json"))
_OURS = re.compile(r"\bmedialane_\w+")
_PART = re.compile(r"_(bucket|sum|count)$")


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("build_dashboards", GRAFANA / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def known():
    """Our series by name, without the parts of histograms."""
    return {metric_reference.shown_name(each) for found in metric_reference.families().values() for each in found}


def alerts():
    groups = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels(path):
    return [panel for panel in json.loads(path.read_text())["panels"] if "targets" in panel]


def test_dashboards_are_those_of_the_program(build):
    assert {path.stem for path in DASHBOARDS} == set(build.DASHBOARDS)
    for path in DASHBOARDS:
        assert path.read_text() == build.text(path.stem), "run `python deploy/grafana/build.py`"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_is_among_vllms_and_has_their_variables(path):
    found = json.loads(path.read_text())
    assert "vllm" in found["tags"]
    assert found["links"][0]["tags"] == ["vllm"]
    names = [variable["name"] for variable in found["templating"]["list"]]
    assert names == ["datasource", "job", "model_name", "instance", "ttft_slo", "tpot_slo", "filters"]
    assert len({panel["id"] for panel in found["panels"]}) == len(found["panels"])


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_description_of_each_panel_ends_with_its_metrics(path):
    for panel in panels(path):
        names = re.findall(r"`([\w:]+)`", panel["description"].rpartition("\n\nMetric")[2])
        assert names, panel["title"]
        for name in names:
            assert any(name in target["expr"] for target in panel["targets"]), (panel["title"], name)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path):
    taken = set()
    for panel in json.loads(path.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_overview_says_that_one_source_is_to_be_scraped():
    (note,) = [p for p in json.loads((GRAFANA / "overview.json").read_text())["panels"] if p["type"] == "text"]
    for words in ("once", "--gateways N", "--metrics-port", "several hosts"):
        assert words in note["options"]["content"]


def test_queries_use_series_that_exist(known):
    queries = [target["expr"] for path in DASHBOARDS for panel in panels(path) for target in panel["targets"]]
    queries += [rule["expr"] for rule in alerts()]
    used = {_PART.sub("", name) for query in queries for name in _OURS.findall(query)}
    assert used - known == set()


def test_each_series_of_the_gateway_and_its_host_is_on_a_dashboard(known):
    """Without the ones that are read elsewhere, or only with others."""
    shown = {name for path in DASHBOARDS for panel in panels(path) for name in _OURS.findall(str(panel["targets"]))}
    elsewhere = {
        "medialane_copied_requests_total",
        "medialane_document_pages_total",  # pages are items
        "medialane_documents_total",
        "medialane_embedding_loaded_bytes_total",
        "medialane_headers_predicted",
        "medialane_migration_seconds",
        "medialane_model_up",  # only of several models
        "medialane_store_embedding_ranges",
        "medialane_store_leased_media",
        "medialane_store_pulls_total",
        "medialane_token_cache_bytes",
        "medialane_worker_kv_usage_ratio",
        "medialane_worker_waiting",
    }
    of_workers_port = {metric_reference.shown_name(each) for each in metric_reference.families()["worker"]}
    assert known - {_PART.sub("", name) for name in shown} - of_workers_port == elsewhere


def test_each_alert_has_a_section_in_the_runbook():
    page = (ROOT / "docs" / "runbook.md").read_text()
    sections = {
        heading.lower(): body for heading, body in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    }
    used = set()
    for rule in alerts():
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert path == "docs/runbook.md"
        assert rule["alert"].lower().startswith(anchor)
        assert "* Look" in sections[anchor], anchor
        used.add(anchor)
    assert used == set(sections)


def test_alerts_have_a_tier_and_a_summary():
    for rule in alerts():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"]["summary"]


def test_scrape_jobs_and_alerts_are_accepted_by_promtool(tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("NOT TESTED: files for Prometheus, since Debian's package prometheus is not installed")
    config = yaml.safe_load((PROMETHEUS / "scrape.yaml").read_text())
    config["rule_files"] = [str(PROMETHEUS / "alerts.yaml")]
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    done = subprocess.run([promtool, "check", "config", str(path)], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr + done.stdout


def test_other_gateways_and_hosts_are_scraped_without_what_the_first_gateway_has():
    jobs = {job["job_name"]: job for job in yaml.safe_load((PROMETHEUS / "scrape.yaml").read_text())["scrape_configs"]}
    drop, memory = jobs["medialane-more-gateways"]["metric_relabel_configs"]
    keep = jobs["medialane-worker-hosts"]["metric_relabel_configs"][0]
    families = metric_reference.families()
    own = {metric_reference.shown_name(each) for each in families["gateway"]}
    of_store = {name for name in map(metric_reference.shown_name, families["host"]) if "_worker_" not in name}
    of_store -= {"medialane_process_memory_bytes", "medialane_gateway_up"}
    of_workers = {name for name in map(metric_reference.shown_name, families["host"]) if "_worker_" in name}
    assert {name for name in own | of_store | of_workers if re.fullmatch(drop["regex"], name)} == of_workers
    assert re.fullmatch(drop["regex"], "vllm:num_requests_running")
    assert (memory["action"], memory["source_labels"]) == ("drop", ["__name__", "worker"])
    kept = {metric_reference.shown_name(each) for each in families["worker"]} | of_store
    assert {name for name in own | of_workers | kept if re.fullmatch(keep["regex"], name)} == kept


def test_reference_lists_what_the_code_exposes():
    page = metric_reference.PAGE.read_text()
    assert page == metric_reference.with_tables(page), "run `python tests/metric_reference.py`"


def test_reference_knows_every_name_in_the_code(known):
    names = ("observability/metrics.py", "observability/collectors.py", "worker/metrics_server.py")
    sources = [ROOT / "src" / "medialane" / name for name in names]
    words = {word for path in sources for word in re.findall(r'"(medialane_\w+)"', path.read_text())}
    assert {word for word in words if word not in known and f"{word}_total" not in known} == set()


def test_series_named_in_the_docs_exist(known):
    page = "\n".join(path.read_text().partition("## What has left")[0] for path in (ROOT / "docs").rglob("*.md"))
    named = set(re.findall(r"`(medialane_[a-z_]+[a-z])(?:\{[^`]*\})?`", page))
    assert {_PART.sub("", name) for name in named} - known == set()


def test_metrics_that_nothing_has_happened_for_have_help_and_type():
    registry = CollectorRegistry()
    Metrics(registry)
    for family in registry.collect():
        assert len(family.documentation) > 10, family.name
        assert not family.documentation.endswith("."), family.name
