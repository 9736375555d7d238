"""What a client sees of a server that starts, or some of whose processes are killed; and its processes' memory."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from load import data_url, process_tree
from medialane.testing.sample_media import sample_jpeg

#: Between two attempts.
POLL_S = 0.02
#: Of what is waited for.
MOST_S = 300.0
CONCURRENCY = 8
SIZE = (512, 384)
MB = 1_000_000

#: The first line of each mapping in /proc/PID/smaps, with its file.
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)")
_SHARED = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")

Errors = (aiohttp.ClientError, ConnectionError, TimeoutError)


class Client:
    """Requests to a server, each over a connection of its own, as a load balancer's health checks are."""

    def __init__(self, base_url: str, model: str) -> None:
        self._url = f"{base_url}/chat/completions"
        self._models = f"{base_url}/models"
        self._model = model

    async def answers(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None if it is not a completion. Raises Errors."""
        async with _session() as session, session.post(self._url, json=body) as response:
            found: dict[str, Any] = await response.json()
            return found if response.status == 200 and found.get("choices") else None

    async def accepts(self) -> bool:
        async with _session() as session, session.get(self._models) as response:
            return response.status == 200

    async def streams(self, body: dict[str, Any], *, num_lines: int | None = None) -> None:
        """Read a stream to its end, or leave after some lines. Raises RuntimeError if it is refused."""
        async with _session() as session, session.post(self._url, json=body | {"stream": True}) as response:
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {await response.text()}")
            async for _ in response.content:
                if num_lines is not None:
                    num_lines -= 1
                    if num_lines <= 0:
                        return

    def image(self, seed: int, *, num_tokens: int = 4) -> dict[str, Any]:
        """A request about the image of this seed. Its answer says whether it was cached."""
        content = [
            {"type": "image_url", "image_url": {"url": data_url(sample_jpeg(seed, *SIZE))}},
            {"type": "text", "text": "What is in the picture?"},
        ]
        return self._request(content, num_tokens)

    def text(self, seed: int, *, num_tokens: int = 4) -> dict[str, Any]:
        return self._request(f"Tell me about number {seed}.", num_tokens)

    def _request(self, content: object, num_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": num_tokens,
            "temperature": 0,
        }


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=MOST_S))


def with_report(body: dict[str, Any]) -> dict[str, Any]:
    """The request, whose answer says what was cached. Plain vLLM knows no such field."""
    return body | {"medialane": {"report": True}}


def is_hit(answer: dict[str, Any]) -> bool:
    return bool(answer["medialane"]["items"][0]["cache"] == "hit")


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


async def seconds_until(attempt: Callable[[], Awaitable[object]], *, since: float) -> float:
    """Return how long after `since` (time.perf_counter) an attempt was successful. Raises TimeoutError."""
    async with asyncio.timeout(MOST_S):
        while True:
            try:
                if await attempt():
                    return time.perf_counter() - since
            except Errors:
                pass
            await asyncio.sleep(POLL_S)


def kill(pids: Sequence[int]) -> float:
    """Kill -9 at once; return when that was."""
    killed_at = time.perf_counter()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return killed_at


def named(pids: Sequence[int], name: str) -> list[int]:
    """Those whose title or command line has `medialane NAME`; without the processes that they have forked."""
    return [pid for pid in pids if f"medialane {name} " in command(pid)]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() + " "
    except OSError:
        return ""


def started_by(serve: int) -> list[int]:
    """All processes below `serve` but the orphan reaper, which acts when `serve` itself has died."""
    return [pid for pid in process_tree(serve)[1:] if "orphan reaper" not in command(pid)]


def gateway_sockets(pid: int) -> list[str]:
    """The unix sockets of the gateways that share this one's port, from its title."""
    words = command(pid).split()
    return [after for word, after in pairwise(words) if word == "--gateway-socket"]


async def is_healthy(path: str) -> bool:
    """Whether the gateway at this socket has a ready worker."""
    connector = aiohttp.UnixConnector(path)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=5)) as session,
        session.get("http://gateway/health") as response,
    ):
        return response.status == 200


def private_bytes(pid: int) -> int:
    """The memory that would be free if the process ended: pages that no other one has mapped, without shared memory."""
    return sum(size for field, size, is_shared in _sizes(pid) if field.startswith("Private_") and not is_shared)


def proportional_bytes(pids: Sequence[int]) -> tuple[int, int]:
    """The memory of these processes together, each page divided among all that have mapped it: the whole, and its part
    in shared memory."""
    found = [(size, is_shared) for pid in pids for field, size, is_shared in _sizes(pid) if field == "Pss:"]
    return sum(size for size, _ in found), sum(size for size, is_shared in found if is_shared)


def _sizes(pid: int) -> Iterator[tuple[str, int, bool]]:
    """Yield the fields of all mappings of a process that are sizes of its resident pages, in bytes, and whether the
    mapping is shared memory (proc_pid_smaps(5))."""
    is_shared = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if (mapping := _MAPPING.match(line)) is not None:
            is_shared = mapping[1].startswith(_SHARED)
        elif line.startswith(("Private_Clean:", "Private_Dirty:", "Pss:")):
            field, size, _ = line.split()
            yield field, int(size) * 1024, is_shared


def cpu_seconds(pids: Sequence[int]) -> float:
    """The CPU time of these processes, and of their children that have ended."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


async def mixed_load(client: Client, num_requests: int) -> None:
    """Send text, new and repeated images, streams, and streams that are left. Raises RuntimeError for an error."""
    todo = iter(range(num_requests))

    async def one_by_one() -> None:
        for number in todo:
            await _send(client, number)

    await asyncio.gather(*(one_by_one() for _ in range(CONCURRENCY)))


async def _send(client: Client, number: int) -> None:
    kind = number % 5
    if kind == 4:
        return await client.streams(client.text(number, num_tokens=64), num_lines=2)
    if kind == 3:
        return await client.streams(client.image(number % 7))
    body = (client.text(number), client.image(1000 + number), client.image(number % 7))[kind]
    if await client.answers(body) is None:
        raise RuntimeError(f"a request failed: {json.dumps(body)[:200]}")
    return None


def drop_page_cache(folders: Sequence[Path]) -> int:
    """Drop what the kernel has cached of all files below these folders, as far as no process has them mapped
    (posix_fadvise(2)), and return how many bytes of its page cache are gone."""
    before = _cached_bytes()
    for folder in folders:
        for parent, _, files in os.walk(folder):
            for name in files:
                try:
                    descriptor = os.open(os.path.join(parent, name), os.O_RDONLY | os.O_NOFOLLOW)
                except OSError:
                    continue
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    return max(0, before - _cached_bytes())


def _cached_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Cached:")) * 1024
