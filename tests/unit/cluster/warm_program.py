"""A warm process without vLLM: `warm_program.py SOCKET [ONCE]`; while the file ONCE exists, which it makes, it takes
long to start. Its forks print what they are as JSON, and wait for SIGTERM if
their command is `stay`. The commands `store` and `gateway` need the model, which takes a while to read."""

import json
import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress

import numpy as np

from medialane.cli.warm import become, serve_forks


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
    if sys.argv[2:]:
        if os.path.exists(sys.argv[2]):
            time.sleep(60)  # time: longer than its test
        open(sys.argv[2], "w").close()
    read: list[str] = []

    def read_model() -> None:
        read.append("model")
        time.sleep(0.5)  # time: requests arrive meanwhile

    supervisor = os.getppid()
    np.random.random()  # as imports do: the generator has a state that forks inherit
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        request = serve_forks(listener, read_model, supervisor)
    argv = become(request, supervisor, {"BY_IMPORT": "1"})
    describe(argv, read)
    if argv[0] == "stay":
        signal.pause()
    return 7


if __name__ == "__main__":
    sys.exit(main())
