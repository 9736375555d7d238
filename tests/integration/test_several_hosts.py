"""Three hosts in network namespaces: one with gateways and a store, two with workers and a store that copies media.

Processes are killed and links are cut meanwhile: no answer is wrong, and all hosts are as before. All connections
between hosts are by mutual TLS."""

import asyncio
import shutil
import tempfile
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import msgspec
import pytest
import trustme
from gates import GATES, PULL
from gateway_parts import png
from host_processes import Host, started_host, stop_host, wait_for_host
from host_program import GATEWAYS, NUM_TOKENS, WORKERS, Place, address
from msgspec.structs import replace

from certificates import tls_settings
from host_state import as_before, stats_of, store_link
from linked_hosts import linked_hosts
from waiting import eventually

pytestmark = [pytest.mark.whole, pytest.mark.timeout(120)]

IMAGES = [png(300, 200, seed) for seed in range(len(GATEWAYS))]
#: The workers of the other hosts.
FAR = (WORKERS, WORKERS[:1])
SETTLE_S = 40.0


class Hosts:
    """`near` has the gateways, `far` the workers."""

    def __init__(self, network, near, far):
        self.network, self.near, self.far = network, near, far

    def close(self, step):
        for host in self.far:
            host.gates.close(step)

    def open(self, step):
        for host in self.far:
            host.gates.open(step)

    def arrived(self):
        """The host and the process of each arrival at a gate."""
        return [(host, pid) for host in self.far for pid in host.gates.arrived()]

    async def evict(self, *hosts):
        for host in hosts or (self.near, *self.far):
            await host.evict()

    async def num_pulls(self):
        """By host of workers."""
        return [sum((await stats_of(host.link)).pulls.num_pulls.values()) for host in self.far]

    async def started(self, step):
        """Start a request at each gateway, which are at `step`. Returns their tasks."""
        self.close(step)
        tasks = [asyncio.create_task(self.near.ask(number, data=data)) for number, data in enumerate(IMAGES)]
        await eventually(lambda: len(self.arrived()) == len(tasks), f"at {step!r}", more=lambda: tasks)
        return tasks

    async def has_all(self):
        """Whether every gateway has all workers, to whose stores its own can send."""
        state = await self.near.state()
        return state.more == (sum(map(len, FAR)),) * len(GATEWAYS)


@pytest.fixture(scope="module")
def processes():
    """The network, and each host's process and folder."""
    with linked_hosts(1 + len(FAR)) as network, ExitStack() as stack:
        folders = [Path(tempfile.mkdtemp(prefix="ml-host-", dir="/dev/shm")) for _ in network.names]
        far = [Place(network.addresses[i + 1], ("store", *names)) for i, names in enumerate(FAR)]
        workers = tuple(place.worker_address(Path(), name) for place in far for name in place.names[1:])
        places = [Place(network.addresses[0], ("store", *GATEWAYS), workers), *far]
        ca = trustme.CA()
        running = []
        for index in (1, 2, 0):
            stack.callback(shutil.rmtree, folders[index])
            tls = tls_settings(folders[index] / "tls", ca, host=places[index].address)
            (folders[index] / "place.json").write_bytes(msgspec.json.encode(replace(places[index], tls=tls)))
            running.append(started_host(folders[index], network.prefix(index)))
            stack.callback(stop_host, running[-1], folders[index])
        found = [(running[2], folders[0]), (running[0], folders[1]), (running[1], folders[2])]
        for process, folder in found:
            wait_for_host(process, folder)
        yield network, [(process.pid, folder) for process, folder in found]


@pytest.fixture
async def hosts(processes):
    network, found = processes
    async with AsyncExitStack() as stack:
        made = []
        for pid, folder in found:
            link = await stack.enter_async_context(store_link(address(folder, "store"), folder))
            made.append(Host(pid, folder, link, None))
        hosts = Hosts(network, made[0], made[1:])
        await eventually(hosts.has_all, "all workers can be sent media", SETTLE_S)
        yield hosts
        for index in range(len(FAR)):
            network.set_link("up", index + 1)
        for step in GATES:
            hosts.open(step)


@pytest.fixture
async def right(hosts):
    """The undisturbed answer of each gateway."""
    await hosts.evict()
    answers = [await hosts.near.ask(number, data=data) for number, data in enumerate(IMAGES)]
    assert list(map(len, answers)) == [NUM_TOKENS] * len(IMAGES), answers
    await hosts.evict()
    return answers


@pytest.fixture
async def as_all_before(hosts, right):
    """Asserts that all hosts are as before the test, and that the next answers are right."""
    async with AsyncExitStack() as stack:
        for host in (hosts.near, *hosts.far):
            await stack.enter_async_context(as_before(host.state, SETTLE_S))
        yield
    await eventually(hosts.has_all, "all workers can be sent media", SETTLE_S)
    assert [await hosts.near.ask(number, data=data) for number, data in enumerate(IMAGES)] == right


def victim_of(hosts, kind):
    """Host and id of the process to kill: one that the first request needs."""
    host, pid = hosts.arrived()[0]
    if kind == "store of the gateways":
        return hosts.near, hosts.near.pid_of("store")
    if kind == "gateway":
        return hosts.near, hosts.near.pid_of(GATEWAYS[0])
    if kind == "store of the workers":
        return host, host.pid_of("store")
    return host, pid if pid != host.pid_of("store") else host.pid_of(WORKERS[0])


@pytest.mark.parametrize("step", [PULL, "before first token", "mid-stream"])
@pytest.mark.parametrize("kind", ["store of the gateways", "store of the workers", "gateway", "worker"])
async def test_killed_process_of_any_host_costs_at_most_its_own_requests(hosts, right, as_all_before, kind, step):
    tasks = await hosts.started(step)
    host, pid = victim_of(hosts, kind)
    num_lost = [arrived for _, arrived in hosts.arrived()].count(pid)
    await host.kill(pid, is_holder=False)
    await hosts.evict(*(other for other in (hosts.near, *hosts.far) if other is not host or "store" not in kind))
    hosts.open(step)
    results = await asyncio.gather(*tasks)
    if (kind, step) == ("store of the gateways", PULL):
        # What they need is gone; the next store may be up before the gateway has given up, and prepare it again.
        assert all(found in ("media_store_unavailable", wanted) for found, wanted in zip(results, right, strict=True))
        return
    if kind == "gateway":
        assert results.pop(0) == "connection lost"
        assert results == right[1:]
        return
    if (kind, step) == ("worker", "mid-stream"):
        assert results.count("worker_lost") == num_lost
        results = [wanted if found == "worker_lost" else found for found, wanted in zip(results, right, strict=True)]
    assert results == right


async def test_image_is_copied_once_to_each_host_that_needs_it(hosts, as_all_before):
    before = await hosts.num_pulls()
    hosts.close("before first token")
    # An engine that has prefilled nothing yet has room for two.
    num_asked = 2 * sum(map(len, FAR))
    asked = [asyncio.create_task(hosts.near.ask(n % len(GATEWAYS), data=IMAGES[0])) for n in range(num_asked)]
    await eventually(lambda: len(hosts.arrived()) == len(asked), "all have been sent", more=lambda: asked)
    assert len({pid for _, pid in hosts.arrived()}) == sum(map(len, FAR)), "every worker has it"
    hosts.open("before first token")
    answers = await asyncio.gather(*asked)
    assert answers == [answers[0]] * len(asked)
    assert [after - number for number, after in zip(before, await hosts.num_pulls(), strict=True)] == [1, 1]


async def test_link_that_is_cut_during_a_pull_sends_the_request_to_another_host(hosts, right, as_all_before):
    tasks = await hosts.started(PULL)
    cut = hosts.far.index(hosts.arrived()[0][0])
    hosts.network.set_link("down", cut + 1)
    hosts.open(PULL)
    assert await asyncio.gather(*tasks) == right
    hosts.network.set_link("up", cut + 1)
