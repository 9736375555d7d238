"""A Ray cluster of two hosts on this machine: the head in our network namespace, a node in one of its own, with a host
name of its own. Started by the commands of examples/ray. Needs root."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from waiting import wait_until

START_S = 90.0
_STOP_S = 20.0
#: A node's smallest: no object goes through Ray.
_OBJECT_STORE_BYTES = 80 << 20
_README = Path(__file__).parents[1] / "examples" / "ray" / "README.md"


class RayHosts(NamedTuple):
    """Addresses of both hosts; `head` is that of the head, with its port; `log` has what both nodes print, whose
    processes are below `node_pids`."""

    addresses: tuple[str, str]
    head: str
    other_name: str
    log: Path
    node_pids: list[int]


def _command(index: int, head: str) -> list[str]:
    """Return the example's command that starts the head, or another node."""
    commands = [line for line in _README.read_text().splitlines() if line.startswith("ray start ")]
    text = commands[index].replace("10.0.0.1:6379", head).replace("6379", head.rpartition(":")[2])
    return [sys.executable, "-m", "ray.scripts.scripts", *shlex.split(text, comments=True)[1:]]


@contextmanager
def ray_hosts(environ: Mapping[str, str], *, cpus: tuple[int, int]) -> Iterator[RayHosts]:
    """Start both nodes, with so many CPUs each; `environ` is theirs. Raises OSError where namespaces cannot be
    created."""
    name, host = f"mlray{os.getpid()}", f"other-{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="mlray-", dir="/tmp"))  # short: Ray's sockets are below it
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        addresses = _linked(name)
        port = _free_port(addresses[0])
        found = RayHosts(addresses, f"{addresses[0]}:{port}", host, folder / "ray.log", [])
        inside = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh"]
        nodes.append(_start([], [f"--temp-dir={folder}"], found, environ, num_cpus=cpus[0]))
        wait_until(lambda: _listens(addresses[0], port), "Ray's head listens", START_S, more=found.log.read_text)
        nodes.append(_start(inside, [], found, environ, num_cpus=cpus[1]))
        wait_until(
            lambda: found.log.read_text().count("Ray runtime started") == 2 or nodes[1].poll() is not None,
            "both nodes of Ray run",
            START_S,
            more=found.log.read_text,
        )
        assert nodes[1].poll() is None, found.log.read_text()
        found.node_pids.extend(node.pid for node in nodes)
        yield found
    finally:
        for node in reversed(nodes):
            _end(node)
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, timeout=10, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _linked(name: str) -> tuple[str, str]:
    """Make the namespace, and a link to it. Returns the addresses of its ends."""
    number = os.getpid() % 250
    ours, theirs = f"10.214.{number}.1", f"10.214.{number}.2"
    link = f"mlr{os.getpid()}"
    _ip("netns", "add", name)
    _ip("link", "add", link, "type", "veth", "peer", "veth0", "netns", name)
    _ip("addr", "add", f"{ours}/24", "dev", link)
    _ip("link", "set", link, "up")
    _ip("-n", name, "addr", "add", f"{theirs}/24", "dev", "veth0")
    for each in ("veth0", "lo"):
        _ip("-n", name, "link", "set", each, "up")
    return ours, theirs


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _start(
    prefix: list[str], words: list[str], hosts: RayHosts, environ: Mapping[str, str], *, num_cpus: int
) -> subprocess.Popen[bytes]:
    """Start the head, or with a `prefix` the other node."""
    index = int(bool(prefix))
    settings = [
        f"--node-ip-address={hosts.addresses[index]}",
        f"--num-cpus={num_cpus}",
        "--num-gpus=0",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
        "--block",
    ]
    with hosts.log.open("ab") as output:
        return subprocess.Popen(
            [*prefix, *_command(index, hosts.head), *words, *settings],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end(node: subprocess.Popen[bytes]) -> None:
    """`ray start --block` ends its processes on SIGTERM; they are in its session."""
    node.terminate()
    with suppress(subprocess.TimeoutExpired):
        node.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait(_STOP_S)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def _listens(address: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((address, port), 1).close()
        return True
    return False
