"""Gateways that share a port: a scrape of one of them covers all."""

import re
import socket
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from medialane.gateway import GatewayMetrics
from medialane.gateway.http import merge
from medialane.observability import Metrics
from medialane.types.errors import StartupFailed
from medialane.types.request import Endpoint, WorkerLoad


class Member:
    """One gateway of the group; all of them see the same worker."""

    def __init__(self, sockets, index):
        self.metrics = Metrics(CollectorRegistry(), host=CollectorRegistry())
        self.num_refreshes = 0
        worker = Endpoint("w0", "unix:/w0", ready=True, num_in_flight=index + 1, load=WorkerLoad(num_running=3))
        self.metrics.watch_workers(lambda: [worker])
        self.metrics.watch_memory(lambda: {"gateway": 100 * self.num_refreshes}, lambda: [({}, {"store": 5})])
        self.health = (200, b"")
        self.socket = sockets[index]
        self.group = GatewayMetrics(
            sockets,
            index,
            metrics=self.metrics,
            health=lambda: self.health,
            refresh_own=self._refresh_own,
        )

    async def _refresh_own(self):
        self.num_refreshes += 1

    async def scrape(self):
        await self.group.refresh()
        return self.group.page().decode()


def values(page, name):
    """Samples by their labels."""
    families = text_string_to_metric_families(page)
    return {tuple(sorted(s.labels.items())): s.value for family in families for s in family.samples if s.name == name}


def by_gateway(page, name):
    return {dict(labels)["gateway"]: value for labels, value in values(page, name).items()}


@pytest.fixture
def members():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        sockets = [str(Path(folder, f"gateway-{i}.sock")) for i in range(2)]
        yield [Member(sockets, i) for i in range(2)]


@pytest.fixture
async def serving(members):
    async with AsyncExitStack() as stack:
        for member in members:
            await stack.enter_async_context(member.group.endpoint())
        yield members


async def test_scrape_of_any_gateway_covers_all(serving):
    serving[0].metrics.request_errors.labels("invalid_image").inc()
    for _ in range(2):
        serving[1].metrics.request_errors.labels("invalid_image").inc()
    for member in serving:
        page = await member.scrape()
        assert by_gateway(page, "medialane_request_errors_total") == {"0": 1, "1": 2}
        assert by_gateway(page, "medialane_worker_in_flight") == {"0": 1, "1": 2}
        assert by_gateway(page, "medialane_gateway_up") == {"0": 1, "1": 1}


async def test_figures_of_a_worker_are_exposed_once(serving):
    page = await serving[0].scrape()
    assert values(page, "medialane_worker_running") == {(("worker", "w0"),): 3}


async def test_memory_of_each_gateway_is_read_for_the_scrape_and_that_of_the_host_occurs_once(serving):
    sizes = values(await serving[0].scrape(), "medialane_process_memory_bytes")
    assert sizes == {
        (("gateway", "0"), ("kind", "gateway")): 100,
        (("gateway", "1"), ("kind", "gateway")): 100,
        (("kind", "store"),): 5,
    }


async def test_each_family_has_one_header(serving):
    headers = re.findall(r"^# TYPE (\S+)", await serving[0].scrape(), re.MULTILINE)
    assert "medialane_stage_seconds" in headers
    assert len(headers) == len(set(headers))


async def test_gateway_that_is_gone_is_exposed_with_its_last_values(members):
    members[1].metrics.request_errors.labels("invalid_image").inc()
    async with members[0].group.endpoint(), members[1].group.endpoint():
        await members[0].scrape()
    page = await members[0].scrape()
    assert by_gateway(page, "medialane_request_errors_total") == {"1": 1}
    assert by_gateway(page, "medialane_gateway_up") == {"0": 1, "1": 0}


async def test_health_on_the_socket_is_that_of_the_one_gateway(serving):
    serving[1].health = (503, b"{}")
    for member, expected in zip(serving, (200, 503), strict=True):
        connector = aiohttp.UnixConnector(member.socket)
        async with aiohttp.ClientSession(connector=connector) as session, session.get("http://gateway/health") as found:
            assert found.status == expected


def test_merged_samples_stand_under_the_first_header():
    one = b'# HELP a_total Help \\n\n# TYPE a_total counter\na_total{g="0"} 1.0\n'
    two = b'# HELP b B\n# TYPE b gauge\nb 2.0\n# HELP a_total Help \\n\n# TYPE a_total counter\na_total{g="1"} 3.0\n'
    merged = b'# HELP a_total Help \\n\n# TYPE a_total counter\na_total{g="0"} 1.0\na_total{g="1"} 3.0\n'
    assert merge([one, two, b""]) == merged + b"# HELP b B\n# TYPE b gauge\nb 2.0\n"


async def test_socket_of_a_gateway_that_runs_is_not_taken_and_one_of_a_dead_gateway_is(serving):
    sockets = [member.socket for member in serving]
    second = Member(sockets, 0)
    with pytest.raises(StartupFailed, match=r"cannot listen at unix:.*gateway-0\.sock: Address already in use"):
        async with second.group.endpoint():
            pass
    assert (await serving[1].group.ask_others("unknown")) == {"0": None}
    assert by_gateway(await serving[1].scrape(), "medialane_gateway_up") == {"0": 1, "1": 1}
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{sockets[0]}.dead")
    third = Member([f"{sockets[0]}.dead", sockets[1]], 0)
    async with third.group.endpoint():
        assert by_gateway(await third.scrape(), "medialane_gateway_up") == {"0": 1, "1": 1}
