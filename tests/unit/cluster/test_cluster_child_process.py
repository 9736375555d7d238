import asyncio
import os
import socket
import sys
from pathlib import Path

from medialane.cluster import ChildProcess, HttpAnswers

SCRIPT = "import socket, sys; print(socket.socket(fileno=int(sys.argv[1])).getsockname()[1])"


async def test_child_inherits_only_the_descriptors_passed_to_it(tmp_path):
    found = tmp_path / "output"
    statuses = []
    with socket.socket() as listener, found.open("wb") as output:
        listener.bind(("127.0.0.1", 0))
        argv = [sys.executable, "-I", "-S", "-c", SCRIPT, str(listener.fileno())]
        for passed in ((listener.fileno(),), ()):
            child = ChildProcess.spawn(argv, dict(os.environ), output.fileno(), pass_fds=passed)
            statuses.append(await child.wait())
        port = listener.getsockname()[1]
    assert statuses == [0, 1]
    assert found.read_text().splitlines()[0] == str(port)


def test_readiness_on_a_socket_forgets_the_one_of_the_previous_run(tmp_path):
    path = Path(tmp_path, "g.sock")
    path.touch()
    check = HttpAnswers("http://gateway/health", path)
    check.reset()
    assert not path.exists()
    assert not asyncio.run(check.passes())
