"""`medialane gateway` processes in which something ends that must not: `python ending_gateways_program.py JSON`.

JSON is a list of [what ends on SIGUSR1: "links" or "server", log, arguments]. The processes are forked from one that
has imported vLLM. SIGUSR1 and SIGTERM are forwarded to them; their exit statuses are printed as JSON.
"""

import asyncio
import json
import os
import signal
import sys

from gateways_program import run

from medialane.gateway import WorkerPool
from medialane.gateway.http_server import BoundedServer


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
    async def main_loop_until_signal(_server: BoundedServer) -> None:
        await _ended()

    BoundedServer.main_loop = main_loop_until_signal


ENDINGS = {"links": _end_links, "server": _end_server}


def main(commands: list[tuple[str, str, list[str]]]) -> None:
    pids = []
    for ending, log, arguments in commands:
        if (pid := os.fork()) == 0:
            ENDINGS[ending]()
            run(log, arguments)
        pids.append(pid)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: [os.kill(pid, number) for pid in pids])
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.stdout.write(json.dumps(statuses))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
