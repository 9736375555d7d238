"""Several `medialane gateway` processes, forked from one that has imported vLLM: `python gateways_program.py JSON`.

JSON is a list of [log, arguments]. Importing vLLM takes ten seconds of CPU time; apart from that each process is as the
command starts it. SIGTERM ends all of them, and so does the failure of one.
"""

import json
import os
import signal
import sys
from typing import NoReturn

from medialane.cli import gateway  # noqa: F401 - vLLM, once for all of them
from medialane.cli.main import main


def run(log: str, arguments: list[str]) -> NoReturn:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        status = main(["gateway", *arguments])
    finally:
        sys.stdout.flush()
        os._exit(status)


def start(commands: list[tuple[str, list[str]]]) -> set[int]:
    pids = set()
    for log, arguments in commands:
        pid = os.fork()
        if pid == 0:
            run(log, arguments)
        pids.add(pid)
    return pids


def stop(pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGTERM)


def wait(pids: set[int]) -> int:
    """The worst exit status."""
    worst = 0
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            worst = 1
            stop(pids)
    return worst


if __name__ == "__main__":
    started = start(json.loads(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: stop(started))
    sys.exit(wait(started))
