"""A headless Chromium (Debian's package `chromium`), driven over its DevTools protocol.

One browser with one tab. What the tab reports as an error is kept (`errors`): exceptions, `console.error`, resources
that could not be loaded, and violations of the page's Content-Security-Policy.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = "chromium"
_START_S = 30.0
_ANSWER_S = 15.0
_POLL_S = 0.05
_STOP_S = 5.0
#: --no-sandbox: Chromium refuses to run as root with it. It shows pages of ours alone.
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--no-default-browser-check", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--mute-audio", "--force-color-profile=srgb"),
    "--remote-debugging-port=0",
)
#: What a key press needs beside its name: the code of keys that have no character.
_KEY_CODES = {"Escape": 27, "Enter": 13, "ArrowUp": 38, "ArrowDown": 40, "Tab": 9}


def is_installed() -> bool:
    return shutil.which(PROGRAM) is not None


class BrowserFailed(Exception):
    """The browser did not do what it was asked for."""


class Tab:
    """The tab of a browser. Every wait has a deadline."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []

    async def goto(self, url: str) -> None:
        """Open a page, and wait until its document and scripts are loaded."""
        result = await self.send("Page.navigate", url=url)
        if "errorText" in result:
            raise BrowserFailed(f"{url}: {result['errorText']}")
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, awaited if it is a promise. Raises BrowserFailed if it throws."""
        result = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise BrowserFailed(f"{expression}: {details.get('exception', {}).get('description', details['text'])}")
        return result["result"].get("value")

    async def until(self, condition: str, timeout_s: float = _ANSWER_S) -> None:
        """Wait until an expression is true. Raises BrowserFailed if it is not in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not await self._is_true(condition):  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(_POLL_S)
                return
        raise BrowserFailed(f"after {timeout_s:g} s still not: {condition}; errors: {self.errors[:5]}")

    async def _is_true(self, condition: str) -> bool:
        try:
            return bool(await self.evaluate(f"Boolean({condition})"))
        except BrowserFailed:  # the page changes, or what it is about is not there yet
            return False

    async def text(self, selector: str) -> str:
        """The text of the first element, as it is rendered."""
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def type(self, text: str) -> None:
        """Type into what has the focus."""
        await self.send("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Press a key, by its name (`Escape`, `p`)."""
        shown = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        code = {"windowsVirtualKeyCode": _KEY_CODES.get(key, ord(key[0].upper()))}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **code, **shown)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    async def resize(self, width: int, height: int, *, scale: float = 1) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **metrics)

    async def prefer(self, scheme: str) -> None:
        """`dark` or `light`: what the user prefers."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        options: dict[str, Any] = {"format": "png"}
        if whole:
            size = (await self.send("Page.getLayoutMetrics"))["cssContentSize"]
            options |= {"captureBeyondViewport": True, "clip": {**size, "x": 0, "y": 0, "scale": 1}}
        data = (await self.send("Page.captureScreenshot", **options))["data"]
        await asyncio.to_thread(_write, path, base64.b64decode(data))

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol. Raises BrowserFailed."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._socket.send_json({"id": number, "method": method, "params": params})
                result = await answer
        except TimeoutError:
            raise BrowserFailed(f"{method}: no answer within {_ANSWER_S:g} s") from None
        finally:
            del self._answers[number]
        if "error" in result:
            raise BrowserFailed(f"{method}: {result['error']['message']}")
        return dict(result["result"])

    async def read(self) -> None:
        """Read what the browser sends, until it ends."""
        async for message in self._socket:
            received = json.loads(message.data)
            if (answer := self._answers.get(received.get("id", 0))) is not None and not answer.done():
                answer.set_result(received)
            elif error := _error_of(received.get("method", ""), received.get("params", {})):
                self.errors.append(error)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _error_of(method: str, params: dict[str, Any]) -> str | None:
    """What an event says is wrong, if it does."""
    if method == "Runtime.exceptionThrown":
        details = params["exceptionDetails"]
        return str(details.get("exception", {}).get("description", details["text"]))
    if method == "Runtime.consoleAPICalled" and params["type"] in {"error", "assert"}:
        return " ".join(str(value.get("value", value.get("description"))) for value in params["args"])
    if method == "Log.entryAdded" and params["entry"]["level"] == "error":
        return f"{params['entry']['text']} {params['entry'].get('url', '')}".strip()
    return None


@asynccontextmanager
async def chromium_tab(*, width: int = 1440, height: int = 900, flags: Sequence[str] = ()) -> AsyncIterator[Tab]:
    """Start a browser; it and its profile are gone at the end."""
    async with contextlib.AsyncExitStack() as stack:
        profile = stack.enter_context(tempfile.TemporaryDirectory(prefix="ml-chromium-", ignore_cleanup_errors=True))
        process = await asyncio.create_subprocess_exec(
            *(PROGRAM, *_FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        stack.push_async_callback(_stop, process)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        socket = await stack.enter_async_context(
            session.ws_connect(await _tab_address(session, Path(profile)), max_msg_size=0)
        )
        tab = Tab(socket)
        reading = asyncio.create_task(tab.read())
        stack.push_async_callback(_cancelled, reading)
        for domain in ("Page", "Runtime", "Log"):
            await tab.send(f"{domain}.enable")
        await tab.resize(width, height)
        yield tab


async def _tab_address(session: aiohttp.ClientSession, profile: Path) -> str:
    """Where its tab is driven. Raises BrowserFailed if it does not start."""
    port_file = profile / "DevToolsActivePort"
    with suppress(TimeoutError):
        async with asyncio.timeout(_START_S):
            while True:
                if port_file.exists() and (lines := port_file.read_text().splitlines()):
                    with suppress(aiohttp.ClientError):  # it does not accept connections yet
                        async with session.get(f"http://127.0.0.1:{lines[0]}/json/list") as response:
                            tabs = [tab for tab in await response.json() if tab["type"] == "page"]
                        if tabs:
                            return str(tabs[0]["webSocketDebuggerUrl"])
                await asyncio.sleep(_POLL_S)
    raise BrowserFailed(f"{PROGRAM} did not start within {_START_S:g} s")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task], timeout=_STOP_S)
