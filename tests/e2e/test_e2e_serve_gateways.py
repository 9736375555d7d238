"""The command line `serve --gateways 2 --workers 2` with TLS and keys, as a user gives it, over simulated workers: what
is killed, and what is restarted under load: all workers by `medialane workers drain --all`, both gateways and the store
by SIGTERM, and no request is lost."""

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp
import pytest
import trustme
from medialane_process import START_S, MedialaneProcess, free_port, launch
from openai_http import OpenAiHttp, both_gateways_answer, chat, picture, text
from process_tree import command_of, descendants, is_alive
from steady_load import SteadyLoad

from host_state import as_before, state_of, store_link
from medialane.testing.tiny_model import TINY_MODEL_FLAGS
from waiting import eventually

pytestmark = [
    pytest.mark.vllm,
    # aiohttp ends a TLS connection of a closed session later than the session, so that its loop may not see the end.
    pytest.mark.filterwarnings("ignore:unclosed (transport|.socket):ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROGRAM = Path(__file__).with_name("serve_simulated_program.py")
#: On a busy machine the processor takes longer to load than items wait by default.
WAIT = ("--prepare-queue-timeout", "200")
#: Answers take ten seconds: longer than it takes to kill a gateway, shorter than it takes to start one.
NUM_TOKENS = 200
CLIENT, ADMIN, METRICS = "a client's key", "the admin's key", "the scraper's key"
DRAIN_S = 4
FLAGS = (
    *("--workers", "2", "--gateways", "2", "--stage", "features", "--preparers", "1", "--arena-size", "64MiB"),
    *("--drain-timeout", str(DRAIN_S), *WAIT),
)


class Served:
    """The command's process, a client of the shared port and, during a test, a connection to the store."""

    def __init__(self, process, client, folder, authority):
        self.process, self.client, self.store = process, client, None
        self.settings, self.key, self.chain = folder / "settings.toml", folder / "key.pem", folder / "cert.pem"
        self.metrics_key, self._authority = folder / "metrics.key", authority
        #: As systemd's, which gets what the process reports.
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(folder / "notify"))
        self.manager.setblocking(False)
        self._reports = []

    def reports(self, line):
        """How often this was reported so far."""
        while True:
            try:
                self._reports += self.manager.recv(4096).decode().split("\n")
            except BlockingIOError:
                return self._reports.count(line)

    def renew_certificate(self):
        """Returns it."""
        certificate = self._authority.issue_cert("127.0.0.1")
        certificate.private_key_pem.write_to_path(self.key)
        certificate.cert_chain_pems[0].write_to_path(self.chain)
        return certificate.cert_chain_pems[0].bytes().decode()

    async def shown_certificate(self):
        return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", self.process.port))

    async def command(self, *words):
        """Run a command of an operator; returns its status and output."""
        argv = [sys.executable, "-m", "medialane", *words, "--gateway", self.client.base_url, "--insecure"]
        environ = {**os.environ, "MEDIALANE_ADMIN_KEY": ADMIN}
        done = await asyncio.to_thread(subprocess.run, argv, env=environ, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    def pid(self, command):
        (found,) = [pid for pid in descendants(self.process.pid) if command in command_of(pid)]
        return found

    async def both_are_up(self):
        return await self.client.by_gateway("medialane_gateway_up") == {"0": 1, "1": 1}

    async def is_whole(self):
        """Whether both gateways serve, with a store."""
        page = await self.client.metrics()
        return page.value("medialane_gateway_up") == 2 and page.value("medialane_arena_bytes")

    async def answer(self):
        """The number of tokens of a long answer about an image. Raises aiohttp.ClientError."""
        num_tokens = 0
        body = chat(picture(1), max_tokens=NUM_TOKENS, stream=True, ignore_eos=True)
        async with self.client.opened(body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    num_tokens += sum(len(c.get("token_ids") or ()) for c in json.loads(line[6:])["choices"])
        return num_tokens

    async def on_both(self):
        """Start answers until both gateways have some in flight. Returns their tasks, and the number by gateway.

        The number is of the same page of metrics that showed all of them: one of a later page could have ended.
        """
        answers, in_flight = [], {}

        async def all_in_flight():
            in_flight.update(await self.client.by_gateway("medialane_worker_in_flight"))
            return sum(in_flight.values()) == sum(not answer.done() for answer in answers)

        async def started():
            answers.append(asyncio.create_task(self.answer()))
            await eventually(all_in_flight, "it is in flight", 30, more=lambda: in_flight)
            return all(in_flight.values())

        await eventually(started, "both gateways have answers in flight", 60)
        return [answer for answer in answers if not answer.done()], in_flight

    async def state(self):
        """Includes which gateways are up, and what the worker runs."""
        page = await self.client.metrics()
        names = ("medialane_gateway_up", "medialane_worker_running")
        return await state_of(self.process.pid, self.store, *map(page.value, names))

    async def idle(self):
        page = await self.client.metrics()
        return not page.value("medialane_arena_leases") and not page.value("medialane_worker_running")


@pytest.fixture(scope="module")
def serving(tiny_model, vllm_environ, tmp_path_factory):
    folder = Path(tempfile.mkdtemp(prefix="ml-e2e-", dir="/tmp"))  # a short path, for sockets
    authority, port = trustme.CA(), free_port()
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    client = OpenAiHttp(f"https://127.0.0.1:{port}", str(tiny_model), trust=trust, api_key=ADMIN)
    served = Served(None, client, folder, authority)
    served.renew_certificate()
    served.settings.touch()
    runtime = folder / "run"
    runtime.mkdir()
    tls = ["--ssl-keyfile", str(served.key), "--ssl-certfile", str(served.chain)]
    served.metrics_key.touch(0o600)
    served.metrics_key.write_text(METRICS)
    flags = [*FLAGS, "--metrics-key-file", str(served.metrics_key)]
    log = tmp_path_factory.mktemp("gateways") / "serve.log"
    own = {"VLLM_API_KEY": CLIENT, "MEDIALANE_ADMIN_KEY": ADMIN, "MEDIALANE_CONFIG": str(served.settings)}
    own["NOTIFY_SOCKET"] = str(folder / "notify")
    process = launch(
        [sys.executable, str(PROGRAM), str(tiny_model), "--port", str(port), *flags, "--", *TINY_MODEL_FLAGS, *tls],
        environ={**vllm_environ, "XDG_RUNTIME_DIR": str(runtime), **own},
        log=log,
    )
    served.process = MedialaneProcess(process, port, str(tiny_model), log)
    yield served
    served.process.stop()
    served.manager.close()
    assert not list(runtime.iterdir())
    shutil.rmtree(folder)


@pytest.fixture
async def served(serving):
    def is_ready():
        serving.reports("READY=1")  # the socket holds ten: messages of a slow start leave no room for the last
        return "Ctrl-C stops it" in serving.process.log.read_text()

    await eventually(is_ready, "it is ready", START_S, more=serving.process.tail)
    async with store_link(serving.process.store_address) as serving.store:
        yield serving


@pytest.mark.parametrize(
    ("key", "refusals"),
    [
        ("", {"/v1/models": 401, "/medialane/decisions": 401, "/medialane/state": 401, "/metrics": 401, "/docs": 401}),
        (CLIENT, {"/medialane/decisions": 403, "/medialane/state": 403, "/metrics": 403}),
        (METRICS, {"/v1/models": 401, "/medialane/decisions": 401, "/medialane/state": 401, "/docs": 401}),
        (ADMIN, {}),
    ],
)
async def test_each_key_opens_what_it_is_for(served, key, refusals):
    """What a key does not open is 401 or 403. A gateway whose worker does not respond in time on a busy machine answers
    503, which is no refusal of the key."""
    paths = (
        "/v1/models",
        "/medialane/decisions",
        "/medialane/state",
        "/metrics",
        "/docs",
        "/health",
        "/ping",
        "/version",
    )
    for _ in range(3):  # each is a connection to any of the gateways
        statuses = {}
        async with served.client.session(Authorization=f"Bearer {key}") as session:
            for path in paths:
                async with session.get(served.client.base_url + path) as response:
                    await response.read()
                    statuses[path] = response.status
        refused = {path: status for path, status in statuses.items() if status not in (200, 503)}
        assert refused == refusals, served.process.tail()
        assert list(statuses.values()).count(503) <= 2, served.process.tail()  # /health and /v1/models


async def test_status_needs_the_key_of_the_metrics(served):
    command = [sys.executable, "-m", "medialane", "status", "--gateway", served.client.base_url, "--insecure"]

    def run(**environ):
        return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)

    refused = await asyncio.to_thread(run)
    assert (refused.returncode, "needs a key" in refused.stderr) == (2, True), refused
    shown = await asyncio.to_thread(run, MEDIALANE_METRICS_KEY=METRICS)
    assert shown.returncode == 0, shown


async def test_page_of_both_gateways_has_no_series_or_family_twice(served):
    await both_gateways_answer(served.client)
    page = await served.client.metrics()
    assert page.twice() == []
    assert {s.labels["gateway"] for s in page.samples if s.name == "medialane_expected_wait_seconds"} == {"0", "1"}


async def test_any_gateway_shows_the_requests_of_both(served):
    answers, in_flight = await served.on_both()

    async def are_shown():  # a state may be a second old
        state = (await served.client.get("/medialane/state")).json
        assert [(gateway["index"], gateway["up"]) for gateway in state["gateways"]] == [("0", True), ("1", True)]
        return {gateway["index"]: gateway["live"] for gateway in state["gateways"]} == in_flight

    for _ in range(3):  # each is a connection to any of the gateways
        await eventually(are_shown, "all are shown", 5)
        live = (await served.client.get("/medialane/requests?live=true")).json["requests"]
        assert {each["gateway"] for each in live} == {"0", "1"}
        found = (await served.client.get(f"/medialane/requests/{live[0]['id']}")).json
        assert found["items"][0]["modality"] == "image"
    for answer in answers:
        answer.cancel()
    await asyncio.gather(*answers, return_exceptions=True)
    await eventually(lambda: served.idle(), "nothing is held or running", 30)


async def test_keys_certificates_and_log_level_change_at_all_gateways_and_a_bad_file_changes_nothing(served):
    async def accepted(key):
        """Whether this key opens the metrics, for connections that may be to any of the gateways."""
        url, statuses = f"{served.client.base_url}/metrics", set()
        for _ in range(6):
            async with served.client.session(Authorization=f"Bearer {key}") as session, session.get(url) as response:
                await response.read()
                statuses.add(response.status)
        return {200: True, 401: False}[statuses.pop()] if len(statuses) == 1 else None

    served.settings.write_text('log-level = "debug"\ngateway-max-text-bytes = "2KiB"\nkeep-arena = true')
    served.metrics_key.write_text("another key")
    renewed = served.renew_certificate()
    status, output = await served.command("reload")
    assert (status, output.splitlines()) == (
        0,
        [
            "changed: --log-level",
            "files read again: --metrics-key-file, --ssl-certfile",
        ],
    )
    assert [await accepted(key) for key in (METRICS, "another key")] == [False, True]
    await served.client.succeed(chat(text("x" * 3000), max_tokens=1))  # the limit needs a restart
    assert {await served.shown_certificate() for _ in range(4)} == {renewed}
    served.settings.write_text('log-level = "loud"')
    served.metrics_key.write_text(METRICS)
    status, output = await served.command("reload")
    assert (status, "log-level 'loud': must be one of" in output) == (2, True)
    assert await accepted("another key")
    served.settings.write_text("")
    assert served.reports("READY=1") == 1  # of the supervisor alone
    served.process.process.send_signal(signal.SIGHUP)

    await eventually(lambda: accepted(METRICS), "the keys are as before", 20, more=served.process.tail)
    assert (served.reports("RELOADING=1"), served.reports("READY=1")) == (1, 2)


async def test_workers_are_listed_with_the_gateways_that_reach_them(served):
    status, output = await served.command("workers", "list", "--json")
    assert status == 0, output
    assert [(each["state"], each["origin"], each["unreachable_from"]) for each in json.loads(output)] == [
        ("ready", "configured", []),
        ("ready", "configured", []),
    ]


async def test_killed_gateway_costs_its_own_requests_only_and_comes_back_on_the_same_port(served):
    assert await served.both_are_up()
    await both_gateways_answer(served.client)
    arenas, killed = served.process.arenas(), served.pid("--gateway-index 0")
    async with as_before(served.state, START_S):
        answers, in_flight = await served.on_both()
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: not is_alive(killed), "it is gone", 5)
        for _ in range(4):  # while it restarts, the other one gets all connections, or they wait for a moment
            await served.client.succeed(chat(picture(2), max_tokens=1))
        results = await asyncio.gather(*answers, return_exceptions=True)
        assert sum(isinstance(result, aiohttp.ClientError) for result in results) == in_flight["0"]
        assert [r for r in results if not isinstance(r, aiohttp.ClientError)] == [NUM_TOKENS] * int(in_flight["1"])
    assert await served.both_are_up()
    log = served.process.log.read_text()
    assert log.count("exited (") == log.count("gateway 0: exited (killed by SIGKILL)") == 1
    assert served.pid("--gateway-index 0") != killed
    await both_gateways_answer(served.client)
    assert served.process.arenas() == arenas


async def test_media_requests_wait_for_a_killed_store_and_are_answered(served):
    """It listens within seconds, and answers when it has loaded its processor."""
    killed = served.process.store_pid()
    os.kill(killed, signal.SIGKILL)
    await eventually(lambda: not is_alive(killed), "it is gone", 5)
    await asyncio.gather(*[served.client.succeed(chat(picture(n), max_tokens=1)) for n in range(3, 6)])
    assert served.process.store_pid() != killed
    await eventually(lambda: served.idle(), "nothing is held or running", 30)


async def test_workers_are_restarted_under_load_and_no_request_is_lost(served):
    load = SteadyLoad(served.client)
    load.start(short=4, long=4)  # so that one runs at a worker when that drains
    await eventually(lambda: len(load.answers) == 8, "all have been answered", 60)
    status, output = await served.command("workers", "drain", "--all")
    await load.stop()
    assert status == 0, output
    assert output.count("ready again after") == 2
    load.check()
    page = await served.client.metrics()
    assert page.value("medialane_migrations_total", reason="worker_draining", outcome="continued")
    assert not page.value("medialane_worker_losses_total")


async def test_gateways_and_store_are_restarted_under_load_and_no_request_is_lost(served):
    load = SteadyLoad(served.client)
    load.start(short=4)
    await eventually(lambda: len(load.answers) == 4, "all have been answered", 60)
    for title in ("medialane gateway 0", "medialane gateway 1", "medialane store"):
        stopped = served.pid(title)
        os.kill(stopped, signal.SIGTERM)
        await eventually(lambda pid=stopped: not is_alive(pid), f"{title} has stopped", 30)
        await eventually(served.is_whole, f"{title} is back", 120)
    await load.stop()
    load.check()


async def test_stop_leaves_nothing(served):
    everyone, arenas = descendants(served.process.pid), served.process.arenas()
    assert arenas
    assert not served.reports("STOPPING=1")  # which also empties the socket: it holds ten reports
    assert served.process.stop() == 0, served.process.tail()
    assert served.reports("STOPPING=1") == 1
    await eventually(lambda: not any(map(is_alive, everyone)), "everyone has ended", 10, more=lambda: everyone)
    assert not [path for path in arenas if path.exists()]
