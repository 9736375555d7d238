"""The gateway that the corpus attacks, in its own process: all of `medialane gateway` with a fake worker.

It differs from the product in two places. Names of `.test` resolve by the table here, which allows DNS rebinding;
resolved addresses are validated as usual. And the preparers' processor is `breaking_processor`, which crashes on images
of certain sizes and is vLLM's for all others.
"""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import uvloop
from aiohttp import ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult

from medialane.config import Config, enter_environ
from medialane.rpc import FakeHandler, Hello, RpcConfig, RpcServer, Welcome
from medialane.rpc.fake import FAKE_CARD

#: Successive results of look-ups of a name; the last one repeats.
NAMES: dict[str, list[list[str]]] = {
    "good.test": [["127.0.0.2"]],
    "inside.test": [["127.0.0.1"]],
    "inside6.test": [["::1"]],
    "mapped.test": [["::ffff:127.0.0.1"]],
    "mixed.test": [["127.0.0.2", "127.0.0.1"]],
    "rebinding.test": [["127.0.0.2"], ["127.0.0.1"]],
    "metadata.google.internal": [["169.254.169.254"]],
    "localhost": [["127.0.0.1", "::1"]],
    "localhost.": [["127.0.0.1"]],
}


class LyingNames(AbstractResolver):
    """The names of the table, and the system's resolver for addresses in any notation."""

    def __init__(self) -> None:
        self._answers = {
            name: itertools.chain(answers, itertools.repeat(answers[-1])) for name, answers in NAMES.items()
        }
        self._system = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        host = host.lower()
        if host.endswith((".test", ".invalid")) and host not in NAMES:
            raise OSError("no such name")
        if host not in NAMES:
            return await self._system.resolve(host, port, family)
        return [_result(host, address, port) for address in next(self._answers[host])]

    async def close(self) -> None:
        await self._system.close()


def _result(host: str, address: str, port: int) -> ResolveResult:
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    return ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST)


class AgreeingWorker(FakeHandler):
    """Accepts features of any gateway: claims equal processor settings and a mapped arena."""

    async def register(self, hello: Hello) -> Welcome:
        welcome = await super().register(hello)
        card = msgspec.structs.replace(welcome.card, processor=hello.processor)
        return msgspec.structs.replace(welcome, card=card)


def main(model: str, port: int, folder: Path, flags: Sequence[str]) -> None:
    """Serve on `port` with the settings of `folder`/config.json until SIGTERM."""
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=Config)
    # vllm reads its environment when it is imported.
    enter_environ(config, model, flags, on_gpu=False, own={"VLLM_MEDIA_CONNECTOR": "medialane"})
    from medialane.cli import gateway

    gateway.PROCESSOR_FACTORY = "breaking_processor:build_processor"
    uvloop.run(_serve(config, model, f"unix://{folder}/worker", port, [*flags, "--disable-uvicorn-access-log"]))


async def _serve(config: Config, model: str, worker: str, port: int, flags: Sequence[str]) -> None:
    from medialane.cli import gateway

    gateway.Fetcher = partial(gateway.Fetcher, resolver=LyingNames())
    server = RpcServer(AgreeingWorker(card=FAKE_CARD, shm=True), RpcConfig())
    await server.serve(worker)
    try:
        with gateway.bind("127.0.0.1", port) as sock:
            await gateway.serve(config, model, flags, workers=[worker], sock=sock)
    finally:
        await server.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
