"""Dialling TCP addresses at which no process listens."""

import asyncio
import socket

import pytest

from medialane.types.errors import NoWorkerReady
from medialane.wire import Authentication, Role, RpcConfig, Security, dial


async def test_free_port_that_connects_to_itself_counts_as_refused(monkeypatch):
    """Linux may choose the dialled port as the source port of the same connection."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()

    class FromThatPort(socket.socket):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            self.bind(address)

    authentication = Authentication(Security.load(RpcConfig()), "rpc", Role.WORKER, Role.GATEWAY)
    monkeypatch.setattr(socket, "socket", FromThatPort)
    with pytest.raises(NoWorkerReady):
        await dial(f"tcp://127.0.0.1:{address[1]}", asyncio.Protocol(), authentication)
