"""/metrics of gateways under load: a page without duplicates, and what dashboards and alerts get of it from a real
Prometheus."""

import asyncio
import json
import re
import time
from pathlib import Path

import pytest
import pytest_asyncio
import yaml
from live_prometheus import compared, program, prometheus, replaced
from openai_http import chat, data_url, image, photo, picture, text
from picture_server import picture_server
from vllm_overview import CONDITIONAL, QUERIES

from waiting import eventually

pytestmark = pytest.mark.vllm

DEPLOY = Path(__file__).parents[2] / "deploy"
METRICS_PAGE = DEPLOY.parent / "docs" / "reference" / "metrics.md"
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
#: Begins what a panel's description says of queries that have no data under every load.
UNTIL = "No data until "
#: What the load below does not do.
NOT_DONE = (
    "a request has been refused",
    "a worker has been lost",
    "a process has ended",
    "a hand-over has failed",
    "an encoder was late or has failed",
    "several gateways share a port",
    "the deployment has encoders",
    "the deployment has prefill workers",
    "workers of another host copy media",
    "workers process media themselves",
)
LOAD_S = 8.0
BROKEN = data_url(b"\xff\xd8\xff\xe0 not a picture")


class Load:
    """Streams and whole answers, texts and pictures, new and known ones, sent and fetched; and broken pictures."""

    def __init__(self, client, server):
        self._client, self._server = client, server
        self._number = 0

    async def round(self, seed):
        words = text(f"Question {seed} {self._number}")
        self._number += 1
        new = 100_000 * seed + self._number
        bodies = [
            chat(words, stream=True, ignore_eos=True),
            chat(picture(1), words, stream=True),
            chat(picture(new, 128, 96), words),
            chat(image(self._server.url(f"a?{new}")), words, stream=True),
        ]
        for body in bodies:
            await self._client.succeed(body)
        assert (await self._client.post(chat(image(BROKEN), words))).status == 400

    async def until(self, seed, end):
        while time.monotonic() < end:
            await self.round(seed)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def live(serve, ours, gateways, starting_gateways, tmp_path_factory):
    """A Prometheus that has scraped `serve` and the gateway `joined` under load."""
    folder = tmp_path_factory.mktemp("prometheus")
    queued = gateways["joined"]
    targets = {"medialane": serve.port, "medialane-queued": starting_gateways["joined"].port}

    async def both_have_joined():
        return (await queued.metrics()).value("medialane_worker_state", state="ready") == 2

    with prometheus(folder, targets, ALERTS) as found:
        await eventually(both_have_joined, "both workers have joined", 60)
        async with picture_server({"a": photo(3, 128, 96)}) as server:
            loads = [Load(client, server) for client in (ours, queued)]
            await asyncio.gather(*(load.round(seed) for seed, load in enumerate(loads)))
            await eventually(found.is_ready, "Prometheus is ready", 20)
            end = time.monotonic() + LOAD_S
            await asyncio.gather(*(load.until(seed, end) for seed, load in enumerate(loads)))
        done = time.time()
        await eventually(lambda: found.has_scraped_since(done), "all that was done has been scraped", 20)
        yield found


def panels(path):
    return [panel for panel in json.loads(path.read_text())["panels"] if "targets" in panel]


def condition(words):
    _, found, rest = words.partition(UNTIL)
    return rest if found else ""


def is_expected(words):
    return not condition(words).startswith(NOT_DONE)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
async def test_each_query_of_the_dashboards_returns_data_or_says_when(live, path):
    queries = [
        (panel["title"], target["expr"])
        for panel in panels(path)
        if is_expected(panel["description"])
        for target in panel["targets"]
    ]
    assert await live.without_data(queries) == []
    everything = [("", target["expr"]) for panel in panels(path) for target in panel["targets"]]
    await live.without_data(everything)  # fails for a query that Prometheus does not understand
    nothing = [("", "no_such_series"), ("", "vector(0) / 0")]
    assert await live.without_data(nothing) == nothing


async def test_variables_of_the_dashboards_offer_all_jobs_and_gateways(live):
    variables = {each["name"]: each for each in json.loads(DASHBOARDS[0].read_text())["templating"]["list"]}
    offered = {}
    for name in ("job", "model_name", "instance"):
        series, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variables[name]["query"]).groups()
        offered[name] = await live.ask(f"label/{label}/values", **{"match[]": replaced(series)})
    assert offered["job"] == ["medialane", "medialane-queued"]
    assert [len(values) for values in offered.values()] == [2, 1, 2]


async def test_each_alert_compares_data_or_says_when(live):
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    expected = [rule for rule in rules if not rule["annotations"].get("until", "").startswith(NOT_DONE)]
    queries = [(rule["alert"], expr) for rule in expected for expr in compared(rule["expr"])]
    assert await live.without_data(queries) == []
    loaded = [rule for group in (await live.ask("rules"))["groups"] for rule in group["rules"]]
    assert sorted(rule["name"] for rule in loaded) == sorted(rule["alert"] for rule in rules)
    assert {rule["health"] for rule in loaded} == {"ok"}


async def test_queries_for_autoscalers_return_data(live):
    section = METRICS_PAGE.read_text().partition("## Autoscaling")[2].partition("## ")[0]
    queries = re.findall(r"^\|[^|]*\|[^|]*\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(queries) == 5
    assert await live.without_data([("", query) for query in queries]) == []
    for query in re.findall(r"^ +query: (.+)$", section, re.MULTILINE):
        assert query in queries


async def test_queries_of_vllms_own_overview_return_data(live):
    missing = await live.without_data([("vLLM / Overview", query) for query in QUERIES])
    assert [query for _, query in missing if not any(name in query for name in CONDITIONAL)] == []
    running = "vllm:num_requests_running"
    jobs = await live.ask("label/job/values", **{"match[]": running})
    assert jobs == ["medialane", "medialane-queued"]
    assert len(await live.ask("label/model_name/values", **{"match[]": running})) == 1


async def test_time_to_first_token_at_the_gateway_has_what_the_workers_leave_out(live):
    """All requests of both gateways are at the same workers, and each took longer at its gateway."""
    gateway, worker = "medialane_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"

    async def mean(name):
        (found,) = await live.values(f"sum(increase({name}_sum[1m])) / sum(increase({name}_count[1m]))")
        return found

    assert await mean(gateway) > await mean(worker)


@pytest.mark.parametrize("stream", [True, False])
async def test_first_token_is_earlier_than_the_end_whether_or_not_the_answer_is_streamed(ours, stream):
    names = ("medialane_time_to_first_token_seconds", "medialane_request_seconds")

    async def totals():
        page = await ours.metrics()
        return [page.value(f"{name}_{part}") for name in names for part in ("count", "sum")]

    before = await totals()
    await ours.succeed(chat(text("Count"), stream=stream, ignore_eos=True, max_tokens=128))
    num_tokens_at, token_s, num_ended, ended_s = (new - old for new, old in zip(await totals(), before, strict=True))
    assert (num_tokens_at, num_ended) == (1, 1)
    assert 0 < token_s < 0.7 * ended_s


@pytest.mark.parametrize("n", [1, 2])
async def test_all_sources_agree_on_the_first_token_of_an_answer_that_is_not_streamed(ours, n):
    async def measured():
        page = await ours.metrics()
        return page.value("medialane_stage_seconds_sum", stage="first_token"), page.value(
            "medialane_time_to_first_token_seconds_sum"
        )

    before = await measured()
    answer = await ours.succeed(chat(text("Count"), ignore_eos=True, max_tokens=128, n=n, temperature=n - 1))
    stage_s, ttft_s = (new - old for new, old in zip(await measured(), before, strict=True))
    timing = {name: float(ms) / 1000 for name, ms in re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"])}
    assert timing["first_token"] == pytest.approx(stage_s, abs=1e-4)
    assert timing["queue"] + timing["prefill"] <= timing["first_token"] < 0.5 * timing["total"]
    assert stage_s <= ttft_s < 0.5 * timing["total"]


@pytest.mark.parametrize("name", ["ours", "queued"])
async def test_page_has_no_series_or_family_twice(ours, gateways, live, name):
    page = await (ours if name == "ours" else gateways["joined"]).metrics()
    assert page.twice() == []
    assert {sample.labels["worker"] for sample in page.samples if sample.name == "vllm:num_requests_running"} == set(
        page.by("medialane_worker_state", "worker")
    )
    check = await asyncio.create_subprocess_exec(
        *(program("promtool"), "check", "metrics"), stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    problems = (await check.communicate(page.text.encode()))[1].decode()
    assert check.returncode in {0, 3}, problems  # 3: names that are unusual, as some of vLLM's
    assert [line for line in problems.splitlines() if line.startswith("medialane_")] == []
