"""medialane's own commands in subprocesses, started as a user starts them, and the processes below them."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import aiohttp
from process_tree import all_pids, arenas_of, command_of, descendants, num_filters

from medialane.tools.check import free_port
from waiting import eventually

#: For plain vLLM: it runs the model in the scheduler's process, as our workers do on a CPU. A separate process for the
#: model takes ten seconds of CPU time to import vLLM, and spins for a second after each step.
ONE_PROCESS_ENGINE = "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor"

#: How often the workers of `serve` ask their engines whether they respond, and for their counts.
PING_S = 0.2

#: Plain vLLM with its engine forked.
FORKING_VLLM = (str(Path(__file__).with_name("plain_vllm_program.py")),)

ENCODER = "medialane encoder"

START_S = 400
STOP_S = 90
_LOG_LINES = 40
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class MedialaneProcess:
    """One `medialane` command that serves HTTP. Started by `spawn`, stopped by `stop`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, model: str, log: Path) -> None:
        self.process = process
        self.base_url = f"http://127.0.0.1:{port}"
        self.port = port
        self.model = model
        self.log = log

    @classmethod
    def spawn(
        cls,
        command: str,
        model: str,
        flags: Sequence[str],
        vllm_flags: Sequence[str],
        *,
        environ: Mapping[str, str],
        log: Path,
        program: Sequence[str] = ("-m", "medialane"),
        prefix: Sequence[str] = (),
    ) -> "MedialaneProcess":
        """Start `medialane command MODEL --port ... FLAGS -- VLLM_FLAGS`; returns before it is ready."""
        port = free_port()
        argv = [*prefix, sys.executable, *program, command, model, "--port", str(port), *flags, "--", *vllm_flags]
        return cls(launch(argv, environ=environ, log=log), port, model, log)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def answers(self, timeout_s: float = START_S) -> None:
        """Wait until /health reports a ready worker. Raises AssertionError with the end of its log."""
        await eventually(self._is_healthy, f"{self.base_url} answers", timeout_s, more=self.tail)

    def stop(self) -> int:
        """Ask it to stop and wait; killed after STOP_S. Returns the exit status. Idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])

    def gateway_pid(self) -> int:
        """The gateway's process: a child of `serve`, or this one."""
        return self._only("medialane gateway") if "medialane serve" in command_of(self.pid) else self.pid

    def store_pid(self) -> int:
        """The store of `serve`."""
        return self._only("medialane store")

    @property
    def store_address(self) -> str:
        words = command_of(self.store_pid()).split()
        return words[words.index("--listen") + 1]

    def worker_addresses(self) -> list[str]:
        """Where the workers of `serve` listen."""
        commands = map(command_of, descendants(self.pid))
        words = [command.split() for command in commands if "medialane worker" in command or ENCODER in command]
        return sorted(found[found.index("--listen") + 1] for found in words)

    def named_workers(self) -> dict[str, str]:
        """The addresses of the workers of `serve`, by the names that its gateways show."""
        commands = [command.split() for command in map(command_of, descendants(self.pid))]
        gateway = next(words for words in commands if "gateway" in words and "--worker" in words)
        named = [after for word, after in pairwise(gateway) if word == "--worker"]
        return dict(worker.split("=", 1) for worker in named)

    def worker_pid(self, worker: str) -> int:
        """The first process of the worker of this name, or that listens at this address."""
        address = worker if worker.startswith("unix:") else self.named_workers()[worker]
        return self._only(f" {self.model} --listen {address}")

    def preparer_pids(self) -> list[int]:
        """The forked preparers: processes that map the store's arena and have their own seccomp filter."""
        arenas, outer = self.arenas(), num_filters(self.store_pid())
        return [pid for pid in all_pids() if arenas_of(pid) & arenas and num_filters(pid) > outer]

    def arenas(self) -> set[Path]:
        return arenas_of(self.store_pid())

    def _only(self, command: str) -> int:
        (found,) = _children_running(self.pid, command)
        return found

    async def _is_healthy(self) -> bool:
        assert self.process.poll() is None, f"it ended with status {self.process.returncode}:\n{self.tail()}"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
                session.get(f"{self.base_url}/health") as response,
            ):
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


def launch(argv: Sequence[str], *, environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process that is asked to stop when this one ends; what it prints goes to `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent,
        )


def kill(pid: int) -> None:
    """kill -9 of this one process."""
    os.kill(pid, signal.SIGKILL)


def _children_running(pid: int, command: str) -> list[int]:
    return [child for child in descendants(pid) if command in command_of(child)]


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
