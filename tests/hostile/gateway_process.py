"""The gateway under attack: start it, send requests, measure its processes."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from medialane_process import launch
from process_tree import descendants

from medialane.config import Config
from medialane.tools.check import free_port
from waiting import wait_until

START_S = 300.0
ANSWER_S = 60.0
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Answer:
    status: int
    code: str | None
    body: str
    seconds: float


class GatewayProcess:
    """A running gateway: requests to it, and the memory of it and of its preparers."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, model: str) -> None:
        self.model = model
        self._process = process
        self._port = port

    def ask(self, body: bytes, key: str = "none", path: str = CHAT) -> Answer:
        """One request of a client with this API key, a chat completion by default."""
        started = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        found = json.loads(text)
        error = (found.get("error") if isinstance(found, dict) else None) or {}
        return Answer(response.status, error.get("code"), text, time.monotonic() - started)

    def announce(self, num_bytes: int) -> Answer:
        """A chat completion of this declared length; zeros are sent until the gateway responds."""
        started = time.monotonic()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {num_bytes}\r\n"
        with socket.create_connection(("127.0.0.1", self._port), timeout=ANSWER_S) as connection:
            connection.sendall(head.encode() + b"\r\n")
            with suppress(ConnectionError):
                connection.sendall(bytes(1 << 20))
            response = http.client.HTTPResponse(connection)
            response.begin()
            text = response.read().decode()
        return Answer(response.status, json.loads(text)["error"]["code"], text, time.monotonic() - started)

    @property
    def ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    @contextmanager
    def others(self) -> Iterator[list[float]]:
        """Append the longest duration of small requests sent during the block."""
        done, slowest = threading.Event(), [0.0]

        def ask() -> None:
            while not done.wait(0.05):
                started = time.monotonic()
                assert self.ready
                slowest[0] = max(slowest[0], time.monotonic() - started)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield slowest
        finally:
            done.set()
            thread.join()

    @contextmanager
    def growth(self) -> Iterator[list[float]]:
        """Append the peak memory growth in MiB during the block, summed over surviving processes.

        The kernel keeps a high-water mark of each process's resident memory (proc(5): VmHWM, set back by clear_refs).
        """
        before = {}
        for pid in (self._process.pid, *descendants(self._process.pid)):
            with suppress(OSError):  # a process that is exiting
                Path(f"/proc/{pid}/clear_refs").write_text("5")
                before[pid] = _resident_kib(pid, "VmRSS")
        grown: list[float] = []
        yield grown
        peak = 0
        for pid, resident in before.items():
            with suppress(OSError, LookupError):  # a process that has ended: its memory is gone
                peak += max(0, _resident_kib(pid, "VmHWM") - resident)
        grown.append(peak / 1024)


@contextmanager
def gateway_process(model: str, config: Config, folder: Path, flags: Sequence[str]) -> Iterator[GatewayProcess]:
    """Start one with vLLM's `flags` and wait until it responds; stopped at the end. Its log is `folder`/log."""
    folder.joinpath("config.json").write_bytes(msgspec.json.encode(config))
    port = free_port()
    here = Path(__file__).resolve().parent
    python_path = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    program = [sys.executable, str(here / "gateway_program.py"), model, str(port), str(folder), *flags]
    own = {"PYTHONPATH": os.pathsep.join(python_path), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = launch(program, environ={**os.environ, **own}, log=folder / "log")
    gateway = GatewayProcess(process, port, model)
    try:
        wait_until(
            lambda: gateway.ready or process.poll() is not None,
            "the gateway is ready",
            START_S,
            more=lambda: folder.joinpath("log").read_text()[-3000:],
        )
        assert process.poll() is None, folder.joinpath("log").read_text()[-3000:]
        yield gateway
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _resident_kib(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise LookupError(field)  # a zombie has none
