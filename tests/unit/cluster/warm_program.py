"""A warm process without vLLM: `warm_program.py SOCKET`. Its forks print what they are as JSON, and wait for SIGTERM if
their command is `stay`. The first word `slow` makes reading the model take a while."""

import json
import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress

import numpy as np

from medialane.cli.warm import Forks, become


def describe(argv: list[str], read: list[str]) -> None:
    fds = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing
            fds.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
    facts = {
        "argv": argv,
        "sys_argv": sys.argv[1:],
        "environ": dict(os.environ),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "leads": os.getpid() == os.getpgrp() == os.getsid(0),
        "descriptors": dict(sorted(fds)),
        "read": read,
        "drawn": [random.random(), float(np.random.random())],
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main() -> int:
    read: list[str] = []

    def read_model() -> None:
        read.append("model")
        time.sleep(0.5)  # time: requests arrive meanwhile

    supervisor = os.getppid()
    np.random.random()  # as imports do: the generator has a state that forks inherit
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        child = Forks(listener, read_model).run()
    argv = become(child, supervisor, {"BY_IMPORT": "1"})
    describe(argv, read)
    if argv == ["stay"]:
        signal.pause()
    return 7


if __name__ == "__main__":
    sys.exit(main())
