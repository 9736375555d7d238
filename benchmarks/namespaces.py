"""Network namespaces joined by veth pairs: 'hosts' of one machine. Needs root.

Host 0 is the centre of a star: it has one address and a link to each other host, which reach it and not one another.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Namespaces(NamedTuple):
    """Names and addresses; `prefix(i)` are the words that run a command in one of them. The name of host 0 is empty if
    that is the namespace of this process."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def prefix(self, index: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[index]] if self.names[index] else []

    def device(self, index: int, peer: int) -> str:
        """Return the name of the network device of host `index` for its link to host `peer`."""
        return f"veth{os.getpid()}n{peer}" if not index else f"veth{index}"

    def set_link(self, state: str, index: int = 1) -> None:
        """Set the link of host `index` `up` or `down`."""
        _ip(self.names[index], "link", "set", self.device(index, 0), state)

    def limit_rate(self, rate: str) -> None:
        """Limit what host 0 sends to host 1, for example to `100mbit`."""
        words = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        _run(*self.prefix(0), "tc", "qdisc", "replace", "dev", self.device(0, 1), *words)

    def num_sent_bytes(self) -> int:
        """Return what host 0 has sent to host 1."""
        return int(_run(*self.prefix(0), "cat", f"/sys/class/net/{self.device(0, 1)}/statistics/tx_bytes"))


@contextmanager
def two_hosts(mtu: int = 1500) -> Iterator[Namespaces]:
    """Raises OSError where namespaces cannot be created."""
    with hosts(2, mtu=mtu) as found:
        yield found


@contextmanager
def hosts(number: int, *, mtu: int = 1500, here: bool = False) -> Iterator[Namespaces]:
    """With `here`, host 0 is the namespace of this process: it reaches the others, and servers of both are in reach of
    this process. Raises OSError where namespaces cannot be created."""
    subnet = f"10.213.{os.getpid() % 250}"  # one for each process: the devices of `here` are seen by all of them
    names = tuple("" if here and not index else f"ml{os.getpid()}n{index}" for index in range(number))
    found = Namespaces(names, tuple(f"{subnet}.{index + 1}" for index in range(number)))
    try:
        for name in filter(None, names):
            _ip("", "netns", "add", name)
            _ip(name, "link", "set", "lo", "up")
        for index in range(1, number):
            _link(found, index, mtu)
        yield found
    finally:
        for name in filter(None, names):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, timeout=10, check=False)


def _link(found: Namespaces, index: int, mtu: int) -> None:
    """Link host `index` to host 0. A device disappears with its peer, hence with the namespace of either."""
    centre, device = found.device(0, index), found.device(index, 0)
    _ip(found.names[index], "link", "add", device, "mtu", str(mtu), "type", "veth", "peer", centre, "mtu", str(mtu),
        "netns", found.names[0] or str(os.getpid()))  # fmt: skip
    for own, other, name in ((0, index, centre), (index, 0, device)):
        addresses = [f"{found.addresses[own]}/32", "peer", f"{found.addresses[other]}/32"]
        _ip(found.names[own], "addr", "add", *addresses, "dev", name)
        _ip(found.names[own], "link", "set", name, "up")


def _ip(namespace: str, *words: str) -> None:
    _run("ip", *(["-n", namespace] if namespace else []), *words)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
