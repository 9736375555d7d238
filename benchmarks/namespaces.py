"""Two network namespaces with a veth pair between them: two 'hosts' of one machine. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Namespaces(NamedTuple):
    """Names and addresses; `prefix(i)` are the words that run a command in one of them."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    def prefix(self, index: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[index]]

    def set_link(self, state: str) -> None:
        """Set the first host's link `up` or `down`."""
        _ip("netns", "exec", self.names[0], "ip", "link", "set", "veth0", state)

    def limit_rate(self, rate: str) -> None:
        """Limit what the first host sends, for example to `100mbit`."""
        words = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        _ip("netns", "exec", self.names[0], "tc", "qdisc", "replace", "dev", "veth0", *words)

    def num_sent_bytes(self) -> int:
        """Return what the first host has sent over its link."""
        command = [*self.prefix(0), "cat", "/sys/class/net/veth0/statistics/tx_bytes"]
        return int(subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout)


@contextmanager
def two_hosts(mtu: int = 1500) -> Iterator[Namespaces]:
    """Raises OSError where namespaces cannot be created."""
    found = Namespaces((f"ml{os.getpid()}a", f"ml{os.getpid()}b"), ("10.213.7.1", "10.213.7.2"))
    try:
        for name in found.names:
            _ip("netns", "add", name)
        first, second = found.names
        _ip("link", "add", "veth0", "mtu", str(mtu), "netns", first, "type", "veth", "peer", "veth1", "netns", second)
        for number, name in enumerate(found.names):
            _ip("-n", name, "addr", "add", f"{found.addresses[number]}/24", "dev", f"veth{number}")
            _ip("-n", name, "link", "set", f"veth{number}", "up", "mtu", str(mtu))
            _ip("-n", name, "link", "set", "lo", "up")
        yield found
    finally:
        for name in found.names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, timeout=10, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
