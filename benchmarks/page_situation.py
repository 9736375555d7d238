"""A situation in which a worker, an origin and a tenant are to blame for what users wait for, and screenshots of the
page that shows it: `python benchmarks/page_situation.py [--look]`.

Everything is as users start it (a store with preparers, a gateway, workers), but for the engines, which are simulated.
Media are fetched over HTTP from origins on the loopback interface. Of four workers, one is stopped (SIGSTOP) for 5 s
every 20 s; one of the origins answers after 3 s; and a tenant sends a new video with each request. With `--look` it
goes on until Ctrl-C, for someone to find out who is to blame.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web
from PIL import Image

from chromium import Tab, chromium_tab
from medialane.testing.sample_media import sample_jpeg, sample_video
from medialane.testing.tiny_model import TINY_MODEL_FLAGS, build_tiny_model, cache_folder
from medialane.tools.check import free_port
from simulated_processes import Host, Process, host_store

ADMIN_KEY = "an operator's key"
NUM_WORKERS = 4
#: The worker that is stopped, for how long, and how often.
STOPPED, STOPPED_S, EVERY_S = 2, 5.0, 20.0
SLOW_ORIGIN_S = 3.0
#: A step takes as long as on a GPU, so that the cores are free for what is real.
SIMULATED = ("--simulated-step-ms", "25", "--simulated-prefill-token-ms", "0.1", "--simulated-embedding-ms", "0.3")
_READY_S = 120.0
_REQUEST_S = 60.0
_POLL_S = 0.1
_NUM_IMAGES = 8
#: Before the first screenshot: the state is over a minute, in which the worker is to be stopped several times.
_SEEN_S = 75.0
_IMAGES = Path(__file__).parents[1] / "docs" / "images"


@dataclass(frozen=True)
class Tenant:
    """Sends `rate` requests a second; `parts` are the media of each."""

    name: str
    rate: float
    parts: Callable[[Origin, random.Random], list[dict[str, Any]]]
    max_tokens: int = 24

    @property
    def key(self) -> str:
        return f"key-of-{self.name}"


class Origin:
    """Web servers with images and clips: a quick one and one that answers late."""

    def __init__(self, *, slow_s: float = SLOW_ORIGIN_S) -> None:
        self._number, self._slow_s = 0, slow_s
        self._images = [sample_jpeg(seed, 640, 448) for seed in range(_NUM_IMAGES)]
        self._clip = sample_video(0, 60, 448, 336)
        self._port = 0

    def image(self, number: int) -> dict[str, Any]:
        """One of a few images, which are asked for again and again."""
        return _image(f"http://127.0.0.1:{self._port}/image/{number}.jpg")

    def slow_image(self) -> dict[str, Any]:
        """One that nobody has asked for, of the slow server."""
        self._number += 1
        return _image(f"http://127.0.0.9:{self._port}/slow/{self._number}.jpg")

    def new_clip(self) -> dict[str, Any]:
        """A clip that nobody has asked for."""
        self._number += 1
        return {"type": "video_url", "video_url": {"url": f"http://127.0.0.1:{self._port}/clip/{self._number}.mp4"}}

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Origin]:
        app = web.Application()
        app.router.add_get("/{kind}/{number}.{type}", self._get)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "0.0.0.0", 0).start()
            self._port = runner.addresses[0][1]
            yield self
        finally:
            await runner.cleanup()

    async def _get(self, request: web.Request) -> web.Response:
        kind, number = request.match_info["kind"], int(request.match_info["number"])
        if kind == "slow":
            await asyncio.sleep(self._slow_s)
        if kind == "clip":
            # Bytes behind the last box change its hash and nothing else.
            data = self._clip + b"\0\0\0\x10free" + number.to_bytes(8, "big")
            return web.Response(body=data, content_type="video/mp4")
        data = self._images[number % _NUM_IMAGES]
        if kind == "slow":
            data += number.to_bytes(8, "big")  # behind the end of the image: another content
        return web.Response(body=data, content_type="image/jpeg", headers={"cache-control": "max-age=600"})


def _image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


TENANTS = (
    Tenant("search", 5.0, lambda origin, chance: [origin.image(chance.randrange(_NUM_IMAGES))]),
    Tenant("chat", 3.0, lambda _origin, _chance: [], max_tokens=60),
    Tenant("catalogue", 0.7, lambda origin, _chance: [origin.slow_image()]),
    Tenant("clips", 0.8, lambda origin, _chance: [origin.new_clip()]),
)


class Site:
    """A gateway and its workers, each process as a user starts it."""

    def __init__(self, host: Host, gateway: Process, port: int, workers: list[Process]) -> None:
        self.model = host.model
        self.gateway = gateway
        self.base_url = f"http://127.0.0.1:{port}"
        self.page_url = f"{self.base_url}/medialane/"
        self.workers = workers

    async def ready(self) -> None:
        """Wait until it serves with all workers. Raises TimeoutError."""
        async with asyncio.timeout(_READY_S), aiohttp.ClientSession() as session:
            while not await self._is_ready(session):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(_POLL_S)

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        with suppress(aiohttp.ClientError):
            async with session.get(f"{self.base_url}/medialane/workers", headers=headers) as response:
                if response.status == 200:
                    workers = await response.json()
                    return bool(sum(worker["state"] == "ready" for worker in workers) == len(self.workers))
        return False


@asynccontextmanager
async def served_site(
    folder: Path, *, num_workers: int = NUM_WORKERS, admin_key: str = ADMIN_KEY
) -> AsyncIterator[Site]:
    """With `admin_key` empty, without keys."""
    model = str(build_tiny_model(cache_folder(os.environ)))
    async with AsyncExitStack() as stack:
        settings = ("--preparers", "2", "--allow-media-network", "127.0.0.0/8")
        host = await stack.enter_async_context(host_store(model, folder, settings))
        workers, flags = [], []
        for number in range(num_workers):
            path = folder / f"worker-{number}.sock"
            workers.append(Process(host.worker_command(f"unix:{path}", SIMULATED), folder / f"worker-{number}.log"))
            stack.callback(workers[-1].end)
            flags += ["--worker", f"worker-{number}=unix:{path}"]
        if admin_key:
            flags += ["--keys", str(_keys(folder)), "--admin-key-file", str(_secret(folder / "admin", admin_key))]
        port = free_port()
        command = ["-m", "medialane", "gateway", model, "--port", str(port), "--store", host.store_address]
        served = ["--", *TINY_MODEL_FLAGS, "--disable-uvicorn-access-log", "--served-model-name", "Qwen2.5-VL-tiny"]
        gateway = Process([*command, *flags, *served], folder / "gateway.log")
        stack.callback(gateway.end)
        site = Site(host, gateway, port, workers)
        await site.ready()
        yield site


def _keys(folder: Path) -> Path:
    lines = [
        json.dumps({"name": tenant.name, "sha256": hashlib.sha256(tenant.key.encode()).hexdigest()})
        for tenant in TENANTS
    ]
    return _secret(folder / "keys", "\n".join(lines))


def _secret(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


class Load:
    """Clients that send requests at constant rates, whatever becomes of earlier ones."""

    def __init__(self, site: Site, origin: Origin, *, speed: float = 1.0) -> None:
        self._site, self._origin, self._speed = site, origin, speed
        self._chance = random.Random(28)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_REQUEST_S)) as session:
            senders = [asyncio.create_task(self._send(session, tenant)) for tenant in TENANTS]
            try:
                yield
            finally:
                for task in senders:
                    task.cancel()
                await asyncio.wait(senders)

    async def _send(self, session: aiohttp.ClientSession, tenant: Tenant) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._chance.expovariate(tenant.rate * self._speed))
                tasks.create_task(self._ask(session, tenant))

    async def _ask(self, session: aiohttp.ClientSession, tenant: Tenant) -> None:
        text = {"type": "text", "text": f"What is there? {self._chance.random()}"}
        body = {
            "model": "Qwen2.5-VL-tiny",
            "messages": [{"role": "user", "content": [*tenant.parts(self._origin, self._chance), text]}],
            "max_tokens": tenant.max_tokens,
            "stream": True,
        }
        headers = {"authorization": f"Bearer {tenant.key}"}
        with suppress(aiohttp.ClientError, TimeoutError):
            url = f"{self._site.base_url}/v1/chat/completions"
            async with session.post(url, json=body, headers=headers) as response:
                async for _ in response.content.iter_any():
                    pass


@asynccontextmanager
async def stopped_worker(site: Site) -> AsyncIterator[None]:
    """Stop one worker again and again, meanwhile."""

    async def stop_and_continue() -> None:
        while True:
            await asyncio.sleep(EVERY_S - STOPPED_S)
            site.workers[STOPPED].send(signal.SIGSTOP)
            try:
                await asyncio.sleep(STOPPED_S)
            finally:
                site.workers[STOPPED].send(signal.SIGCONT)

    task = asyncio.create_task(stop_and_continue())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def log_in(tab: Tab, site: Site) -> None:
    """Open the page with the operator's key. Raises BrowserFailed."""
    await tab.goto(site.page_url)
    await tab.until("document.activeElement.id === 'key'")
    await tab.type(ADMIN_KEY)
    await tab.press("Enter")
    await tab.until("!document.querySelector('#content').hidden")
    tab.errors.clear()  # the 401 that asks for the key


async def take_screenshots(site: Site, folder: Path) -> None:
    """A screenshot for each of the three. Raises BrowserFailed if the page does not name it."""
    async with chromium_tab(width=1440, height=840) as tab:
        await tab.prefer("light")
        await log_in(tab, site)
        await asyncio.sleep(_SEEN_S)
        worker = f"worker-{STOPPED}"
        await tab.until(_found(worker, "red"), EVERY_S + STOPPED_S)
        await asyncio.sleep(0.5)
        await _take(tab, folder / "page-worker.png")
        await _show_requests(tab, "127.0.0.9")
        await tab.click("#request-rows .row.ended")
        await tab.until("document.querySelectorAll('#detail .item').length")
        await _take(tab, folder / "page-origin.png")
        await tab.press("Escape")
        await tab.press("Escape")
        await tab.prefer("dark")
        await _show_requests(tab, "clips")
        await _take(tab, folder / "page-tenant.png")


def _found(subject: str, level: str = "") -> str:
    """Whether the page says something of a subject."""
    return f"""[...document.querySelectorAll('#findings li')].some((line) => line.className.includes('{level}')
        && line.querySelector('b').innerText.startsWith('{subject}'))"""


async def _show_requests(tab: Tab, subject: str) -> None:
    await tab.until(_found(subject), EVERY_S)
    await tab.evaluate(f"""[...document.querySelectorAll('#findings li')].find((line) =>
        line.querySelector('b').innerText.startsWith('{subject}')).querySelector('button').click()""")
    await asyncio.sleep(3)
    await tab.evaluate("scrollTo(0, 0)")


async def _take(tab: Tab, path: Path) -> None:
    await tab.screenshot(path)
    await asyncio.to_thread(_shrink, path)


def _shrink(path: Path) -> None:
    """Chromium compresses quickly, not well; 256 colours are enough if rare ones, as red, are among them."""
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


async def main(arguments: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="medialane-page-", dir="/tmp"))
        origin = await stack.enter_async_context(Origin().served())
        site = await stack.enter_async_context(served_site(Path(folder)))
        await stack.enter_async_context(Load(site, origin).running())
        await stack.enter_async_context(stopped_worker(site))
        if arguments.look:
            print(f"{site.page_url} with the key: {ADMIN_KEY}", flush=True)
            await asyncio.Event().wait()
        await take_screenshots(site, arguments.folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--look", action="store_true", help="go on until Ctrl-C")
    parser.add_argument("--folder", type=Path, default=_IMAGES, help="where the screenshots are written")
    with suppress(KeyboardInterrupt):
        uvloop.run(main(parser.parse_args()))
