"""Two network namespaces that are connected by a veth pair: "hosts" whose processes see each other only over TCP/IP.

They need root. The memory and the PIDs of the machine are shared, so UCX must be restricted to tcp (UCX_TLS).
"""

import os
import secrets
import subprocess
import sys
import tempfile
from contextlib import contextmanager

import pytest


class Network:
    def __init__(self) -> None:
        token = secrets.token_hex(3)
        self._names = [f"ml{token}a", f"ml{token}b"]
        self._scripts = []
        try:
            for name in self._names:
                ip("netns", "add", name)
            first, second = self._names
            ip("link", "add", "veth0", "netns", first, "type", "veth", "peer", "name", "veth0", "netns", second)
            for name, address in zip(self._names, ("10.213.7.1/24", "10.213.7.2/24"), strict=True):
                ip("-n", name, "address", "add", address, "dev", "veth0")
                ip("-n", name, "link", "set", "veth0", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            detail = getattr(error, "stderr", "") or error
            pytest.skip(f"NOT TESTED: network namespaces cannot be created here (they need root): {detail}")

    @contextmanager
    def inside(self, index: int):
        """Python processes that are started in the block by `sys.executable` are in that namespace. UCX finds network
        devices in /sys, which `ip netns exec` mounts for them."""
        python = sys.executable
        with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as script:
            script.write(f'#!/bin/sh\nexec ip netns exec {self._names[index]} {python} "$@"\n')
        os.chmod(script.name, 0o700)
        self._scripts.append(script.name)
        sys.executable = script.name
        try:
            yield
        finally:
            sys.executable = python

    def link(self, state: str) -> None:
        """Set one end of the link "up" or "down"."""
        ip("-n", self._names[1], "link", "set", "veth0", state)

    def close(self) -> None:
        for script in self._scripts:
            os.unlink(script)
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=10, check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10, check=True)
