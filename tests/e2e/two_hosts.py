"""Two hosts: this one with gateways and stores, and a network namespace with two vLLM workers and their store.

The hosts share no arena directory, so media cannot travel in shared memory. NIXL is restricted to TCP over the link:
between namespaces of one machine it would read the other process's memory.
"""

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medialane_process import STOP_S, MedialaneProcess, free_port, launch
from openai_http import OpenAiHttp, chat, picture
from process_tree import command_of, descendants

from host_state import stats_of
from medialane.store import StoreLink
from waiting import eventually

GATEWAYS_PROGRAM = Path(__file__).with_name("gateways_program.py")

FIRST_PORT = 7100
WORKERS = ("far-0", "far-1")
#: By gateway: the mover that copies its media, its store on this host, and its flags.
PATHS = {
    "features/nixl": ("nixl", "store", ("--stage", "features", "--transport", "nixl")),
    "features/tcp": ("tcp", "store", ("--stage", "features", "--transport", "tcp")),
    "features/auto without nixl": ("tcp", "store without nixl", ("--stage", "features")),
    "features/inline": (None, "store", ("--stage", "features", "--transport", "inline")),
    "url/tcp": ("tcp", "store", ("--stage", "url", "--transport", "tcp")),
    "decoded/nixl": ("nixl", "store", ("--stage", "decoded", "--transport", "nixl")),
}
STORES = {"store": "on", "store without nixl": "off"}

#: A busy machine delays heartbeats for longer than a network does.
LOST_S = 3.0


class TwoHosts:
    """Started at once; `ready` waits for everything, and the owner calls `close`. `network` are the namespaces: host 0
    is this one."""

    def __init__(
        self, network: Any, *, model: str, flags: tuple[str, ...], media: tuple[str, ...], environ, logs: Path
    ):
        self.network = network
        self.model = model
        self.logs = logs
        self._flags = flags
        self._media = media
        self._folders = [Path(tempfile.mkdtemp(prefix="ml-hosts-", dir="/dev/shm")) for _ in range(2)]
        secret = self._folders[0] / "secret"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        self._environ = [self._environ_of(index, environ, secret) for index in range(2)]
        self.processes = {name: self._start_worker(name) for name in WORKERS}
        self.processes |= {name: self.start_store(name) for name in STORES}
        self.gateways = self._start_gateways()

    def _environ_of(self, index: int, environ: Mapping[str, str], secret: Path) -> dict[str, str]:
        settings = {
            "MEDIALANE_RPC_SECRET_FILE": str(secret),
            "MEDIALANE_RPC_INSECURE": "true",
            "MEDIALANE_RPC_TCP_HEARTBEAT_TIMEOUT": str(LOST_S),
            "MEDIALANE_RPC_TCP_HEARTBEAT_INTERVAL": "0.3",
            "MEDIALANE_ARENA_DIRECTORY": str(self._folders[index]),
            "MEDIALANE_ARENA_SIZE": "256MiB",
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": self.network.device(index, 1 - index),
            "UCX_PROTO_INFO": "y",
            "VLLM_HOST_IP": self.network.addresses[index],
        }
        return {**environ, **settings}

    def _launch(self, index: int, name: str, argv: list[str]) -> subprocess.Popen:
        command = [*self.network.prefix(index), sys.executable, *argv]
        return launch(command, environ=self._environ[index], log=self.log(name))

    def log(self, name: str) -> Path:
        return self.logs / f"{name.replace('/', '-').replace(' ', '-')}.log"

    def _start_worker(self, name: str) -> subprocess.Popen:
        here = self.network.addresses[0]
        gateways = ",".join(f"{here}:{FIRST_PORT + number}" for number in range(len(PATHS)))
        joining = ["--join", gateways, "--worker-name", name, "--store", self.address("far"), "--start-store"]
        nixl = ["--peer-nixl", "on"]
        argv = ["-m", "medialane", "worker", self.model, *joining, *nixl, "--", *self._flags]
        return self._launch(1, name, argv)

    def start_store(self, name: str) -> subprocess.Popen:
        pulled = ["--peer-listen", f"tcp://{self.network.addresses[0]}:0", "--peer-nixl", STORES[name]]
        argv = ["store", self.model, "--listen", self.address(name), "--preparers", "1", *pulled, *self._media]
        return self._launch(0, name, ["-m", "medialane", *argv, "--", *self._flags])

    def address(self, store: str) -> str:
        return f"unix:{self.directory(store)}/{store.replace(' ', '-')}.sock"

    def directory(self, store: str) -> Path:
        return self._folders[int(store == "far")]

    def _start_gateways(self) -> dict[str, MedialaneProcess]:
        commands, places = [], {}
        for number, (name, (_, store, flags)) in enumerate(PATHS.items()):
            places[name] = free_port(), self.log(name)
            joined = ["--join-listen", f"tcp://{self.network.addresses[0]}:{FIRST_PORT + number}"]
            ours = [self.model, "--port", str(places[name][0]), *joined, "--store", self.address(store), *flags]
            commands.append([str(places[name][1]), [*ours, *self._media, "--", *self._flags], None])
        self._environ[0]["VLLM_MEDIA_CONNECTOR"] = "medialane"
        process = self._launch(0, "gateways", [str(GATEWAYS_PROGRAM), json.dumps(commands)])
        self.processes["gateways"] = process
        return {name: MedialaneProcess(process, port, self.model, log) for name, (port, log) in places.items()}

    async def ready(self) -> dict[str, OpenAiHttp]:
        """Wait until every gateway has both workers; return their clients."""
        clients = {}
        for name, process in self.gateways.items():
            await process.answers()
            clients[name] = OpenAiHttp(process.base_url, self.model)
        for client in clients.values():
            await self.joined(client)
        # The workers' store starts its NIXL process for the first copy; a busy machine takes longer than it waits.
        by_nixl = next(clients[name] for name, (mover, *_) in PATHS.items() if mover == "nixl")
        await eventually(lambda: is_answered(by_nixl, chat(picture(79))), "media are copied by NIXL", 60)
        return clients

    async def joined(self, client: OpenAiHttp, number: int = 2, timeout_s: float = 240.0) -> None:
        async def is_joined() -> bool:
            return (await client.metrics()).value("medialane_worker_state", state="ready") == number

        await eventually(is_joined, f"{number} workers have joined", timeout_s, more=self._tails)

    def _tails(self) -> str:
        return "\n".join(self.log(name).read_text()[-2000:] for name in WORKERS)

    def far_store_pid(self) -> int:
        """The store that a worker has started; 0 if there is none."""
        pids = (pid for name in WORKERS for pid in descendants(self.processes[name].pid))
        return next((pid for pid in pids if "medialane store" in command_of(pid)), 0)

    def close(self) -> None:
        """Stop everything, gateways first: they hold what is in the stores. Idempotent."""
        if not self.processes:
            return
        self.processes["gateways"].terminate()
        self.processes["gateways"].wait(STOP_S)
        for process in self.processes.values():
            process.terminate()
        statuses = {name: process.wait(STOP_S) for name, process in self.processes.items()}
        self.processes.clear()
        for folder in self._folders:
            shutil.rmtree(folder)
        assert set(statuses.values()) == {0}, statuses


async def is_answered(client: OpenAiHttp, body: dict[str, Any]) -> bool:
    return (await client.post(body)).status == 200


async def num_pulls(store: StoreLink) -> Counter[str]:
    """How many entries a store has copied, by mover."""
    return Counter((await stats_of(store)).pulls.num_pulls)
