"""Several `medialane gateway` processes, forked from one that has imported vLLM and built what those with the last
one's flags of vLLM start with: `python gateways_program.py JSON`.

JSON is a list of [log, arguments, ending]. Importing vLLM takes ten seconds of CPU time; apart from that each process
is as the command starts it. SIGTERM ends all of them, and so does the failure of one; their exit statuses are printed.

`ending` is what ends in a gateway on SIGUSR1, though it must not: one of ENDINGS, or null.
"""

import asyncio
import gc
import json
import os
import signal
import sys
from typing import NoReturn

from medialane.cli import gateway, main
from medialane.gateway import BoundedServer, WorkerPool
from medialane.runtime.linux import exit_at_once


async def _ended() -> None:
    signalled = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, signalled.set)
    await signalled.wait()


def _end_links() -> None:
    whole = WorkerPool.run

    async def run_until_signal(pool: WorkerPool) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(whole(pool))
            await _ended()
            raise RuntimeError("an injected error")

    WorkerPool.run = run_until_signal


def _end_server() -> None:
    async def main_loop_until_signal(server: BoundedServer) -> None:
        ended = asyncio.create_task(_ended())
        # By SIGTERM, if the test that ends it does not run.
        while not (ended.done() or server.should_exit):  # noqa: ASYNC110 - uvicorn sets a flag, not an event
            await asyncio.sleep(0.1)  # time: how soon it sees the flag

    BoundedServer.main_loop = main_loop_until_signal


ENDINGS = {"links": _end_links, "server": _end_server}


def run(log: str, arguments: list[str]) -> NoReturn:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        status = main(["gateway", *arguments])
    finally:
        exit_at_once(status)


def prebuild(arguments: list[str]) -> None:
    """What those with these flags of vLLM start with."""
    gateway.prebuild(arguments[0], arguments[arguments.index("--") + 1 :])


def start(commands: list[tuple[str, list[str], str | None]]) -> list[int]:
    pids = []
    prebuild(commands[-1][1])
    gc.collect()
    gc.freeze()  # garbage collection would write to, and so copy, each page that they share
    for log, arguments, ending in commands:
        pid = os.fork()
        if pid == 0:
            if ending is not None:
                ENDINGS[ending]()
            run(log, arguments)
        pids.append(pid)
    return pids


def send(number: int, pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


def wait(pids: list[int], ending: list[int]) -> list[int]:
    """The exit statuses. If one of `ending` fails, the others of them have the time to fail as well."""
    found: dict[int, int] = {}
    while len(found) < len(pids):
        pid, status = os.wait()
        found[pid] = os.waitstatus_to_exitcode(status)
        if status and (pid not in ending or found.keys() >= set(ending)):
            send(signal.SIGTERM, [other for other in pids if other not in found])
    return [found[pid] for pid in pids]


if __name__ == "__main__":
    commands = json.loads(sys.argv[1])
    started = start(commands)
    ending = [pid for pid, command in zip(started, commands, strict=True) if command[2] is not None]
    signal.signal(signal.SIGTERM, lambda *_: send(signal.SIGTERM, started))
    signal.signal(signal.SIGUSR1, lambda *_: send(signal.SIGUSR1, ending))
    statuses = wait(started, ending)
    sys.stdout.write(f"\n{json.dumps(statuses)}\n")
    exit_at_once(int(any(statuses)))  # objects that gc.freeze() keeps to the end are reported as leaks by nanobind
