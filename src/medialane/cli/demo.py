"""`medialane demo`: images and a PDF through a gateway and two workers, each response compared by token ids with plain
vLLM, which is sent the pages of the PDF as images."""

from __future__ import annotations

import argparse
import asyncio
import base64
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from rich.console import Console
from rich.table import Table

from medialane.cli.request_steps import Timing
from medialane.cluster.placement import find_hardware
from medialane.config import foreign_environ, process_environ, vllm_defaults
from medialane.observability import STEPS
from medialane.runtime.stop import stopped_by_signals
from medialane.testing.sample_media import sample_jpeg
from medialane.testing.tiny_model import TINY_MODEL_FLAGS, build_tiny_model, cache_folder
from medialane.tools.check.case import Part
from medialane.tools.check.media import as_images, document
from medialane.tools.check.servers import ServerProcess, plain_vllm, server_process
from medialane.types.errors import StartupFailed

_STOP_S = 30.0
_MAX_TOKENS = 16

#: Runs a server of the model in this folder, with an OpenAI interface.
DemoServer = Callable[[str], AbstractAsyncContextManager[ServerProcess]]


@dataclass(frozen=True)
class DemoRequest:
    """One request: its name in the tables, its message content, whether its response is streamed."""

    name: str
    content: list[Part]
    stream: bool = False


@dataclass(frozen=True)
class DemoAnswer:
    token_ids: list[int]
    server_timing: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--image", action="append", default=[], type=Path, metavar="PATH", help="your own image; repeat for two"
    )
    parser.add_argument("--keep", action="store_true", help="serve after the comparison, until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every response equals plain vLLM's, 1 if one differs. Raises StartupFailed."""
    build = partial(build_tiny_model, cache_folder(process_environ()))
    return asyncio.run(compared(_images(args.image), build, plain=_plain, ours=_medialane, keep=args.keep))


async def compared(
    images: Sequence[bytes], build_model: Callable[[], Path], *, plain: DemoServer, ours: DemoServer, keep: bool
) -> int:
    """Return the exit status of the demo. `plain` is the server that `ours` is compared with. Raises StartupFailed."""
    console = Console()
    with console.status("building a tiny Qwen2.5-VL with random weights"):
        model = str(await asyncio.to_thread(build_model))
    console.print(f"model: tiny Qwen2.5-VL, random weights, in {model}", soft_wrap=True)
    async with _web_server(images) as web_url:
        questions = _requests(images, web_url)
        console.print("1. plain vLLM answers five requests; it is sent the pages of the PDF as images")
        with console.status("it takes about 40 s to start on a CPU"):
            async with plain(model) as server:
                for_plain = [replace(question, content=as_images(question.content)) for question in questions]
                expected = await _ask_all(server.base_url, model, for_plain)
        console.print(f"2. medialane answers the same{', and then keeps serving' if keep else ''}")
        async with ours(model) as server:
            answers = await _ask_all(server.base_url, model, questions)
            _show(console, questions, answers)
            status = _compare(console, questions, answers, expected)
            if keep:
                url = server.base_url.removesuffix("/v1")
                _say_next(
                    console,
                    "medialane serves until Ctrl-C. In another terminal:",
                    f"URL={url} MODEL={shlex.quote(model)}",
                )
                with stopped_by_signals() as stop:  # the first: a second one kills
                    await stop.asked.wait()
    if not keep:
        command = shlex.join(["medialane", "serve", model, "--", *TINY_MODEL_FLAGS])
        _say_next(console, "The demo has stopped its servers. To keep one, `medialane demo --keep`, or:", command)
    return status


def _images(paths: Sequence[Path]) -> list[bytes]:
    """Return two images: the user's first, then generated ones."""
    try:
        given = [path.read_bytes() for path in paths[:2]]
    except OSError as error:
        raise StartupFailed(f"--image {error.filename}: {error.strerror}") from error
    return [*given, *(sample_jpeg(seed) for seed in range(len(given), 2))]


def _requests(images: Sequence[bytes], web_url: str) -> list[DemoRequest]:
    first, second = ({"type": "image_url", "image_url": {"url": _data_url(i)}} for i in images)
    first_by_url = {"type": "image_url", "image_url": {"url": f"{web_url}/0"}}
    ask = {"type": "text", "text": "What is in the picture?"}
    return [
        DemoRequest("text only", [{"type": "text", "text": "Say something about pictures."}]),
        DemoRequest("one image, data URL", [first, ask]),
        DemoRequest("the same by http URL", [first_by_url, ask]),
        DemoRequest("PDF, two pages", [document(0, 2), {"type": "text", "text": "What is it about?"}]),
        DemoRequest("two images, streaming", [first, {"type": "text", "text": "and"}, second, ask], stream=True),
    ]


def _data_url(image: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(image).decode()


@asynccontextmanager
async def _web_server(images: Sequence[bytes]) -> AsyncIterator[str]:
    """Serve the images as /0 and /1 on the loopback interface."""

    async def get(request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        return web.Response(body=images[number], content_type="image/jpeg", headers={"Cache-Control": "max-age=60"})

    app = web.Application()
    app.router.add_get("/{number:[01]}", get)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _medialane(model: str) -> AbstractAsyncContextManager[ServerProcess]:
    """Run `medialane serve` with two workers, as a user would; its progress is shown on the terminal."""
    command = ["-P", "-m", "medialane", "serve", model, "--workers", "2"]
    settings = ["--arena-size", "256MiB", "--allow-media-network", "127.0.0.0/8"]
    flags = ["--unannounced", *settings, "--", *TINY_MODEL_FLAGS]
    # Of VLLM_API_KEY plain vLLM knows, too.
    environ = process_environ() | {"MEDIALANE_API_KEYS": "", "MEDIALANE_KEYS": ""}
    return server_process("medialane serve", command, flags, model=model, environ=environ, log=None, stop_s=_STOP_S)


@asynccontextmanager
async def _plain(model: str) -> AsyncIterator[ServerProcess]:
    environ = foreign_environ(process_environ()) | vllm_defaults(
        model, TINY_MODEL_FLAGS, on_gpu=bool(find_hardware(process_environ()).gpus), num_workers=1
    )
    environ |= dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1")  # vLLM fetches the image by a proxy, too
    with tempfile.TemporaryDirectory(prefix="medialane-demo-") as folder:
        async with plain_vllm(model, TINY_MODEL_FLAGS, environ=environ, log=Path(folder) / "vllm.log") as server:
            yield server


async def _ask_all(base_url: str, model: str, questions: Sequence[DemoRequest]) -> list[DemoAnswer]:
    key = process_environ().get("VLLM_API_KEY") or "none"  # both servers have it
    direct = DefaultAsyncHttpxClient(trust_env=False)  # a proxy of the environment may not reach loopback
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=120, http_client=direct) as client:
        return [await _ask(client, model, question) for question in questions]


async def _ask(client: AsyncOpenAI, model: str, question: DemoRequest) -> DemoAnswer:
    response = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": question.content}],  # type: ignore[misc, list-item]  # built from JSON
        max_tokens=_MAX_TOKENS,
        temperature=0,
        stream=question.stream,
        extra_body={"return_token_ids": True},
    )
    parsed: Any = response.parse()
    token_ids: list[int] = []
    if question.stream:
        async for chunk in parsed:
            token_ids += _token_ids(chunk)
    else:
        token_ids += _token_ids(parsed)
    return DemoAnswer(token_ids, response.headers.get("server-timing", ""))


def _token_ids(message: Any) -> list[int]:
    """Return the ids from vLLM's extension of OpenAI's choices."""
    return [token for choice in message.choices for token in (choice.model_extra or {}).get("token_ids") or ()]


def _show(console: Console, questions: Sequence[DemoRequest], answers: Sequence[DemoAnswer]) -> None:
    """Print one column per request and one row per step, so that the table fits a terminal."""
    table = Table("ms by step (Server-Timing)", *(q.name for q in questions))
    timings = [Timing.of(answer.server_timing) for answer in answers]
    for step in STEPS:
        if any(step in timing.steps_ms for timing in timings):
            found = (timing.steps_ms.get(step) for timing in timings)
            table.add_row(step, *("" if ms is None else f"{ms:.1f}" for ms in found))
    table.add_row("total", *(f"{timing.total_ms:.1f}" for timing in timings))
    table.add_row("cache", *(timing.described.get("cache", "") for timing in timings))
    table.add_row("bytes copied", *(f"{int(timing.described.get('copied', 0)):,}" for timing in timings))
    console.print(table)
    console.print("Streaming responses show the steps that were complete when the headers were sent.")


def _compare(
    console: Console, questions: Sequence[DemoRequest], ours: Sequence[DemoAnswer], theirs: Sequence[DemoAnswer]
) -> int:
    table = Table("request", "answer (token ids)", "plain vLLM")
    identical = True
    for question, our, their in zip(questions, ours, theirs, strict=True):
        same = bool(our.token_ids) and our.token_ids == their.token_ids
        identical &= same
        table.add_row(question.name, " ".join(map(str, our.token_ids)), "equal" if same else f"{their.token_ids}")
    console.print(table)
    console.print(f"token-identical: {'yes' if identical else 'no'}")
    return 0 if identical else 1


def _say_next(console: Console, text: str, command: str) -> None:
    """Print lines to paste into a shell, each on one line."""
    console.print(f"\n{text}")
    if sys.prefix != sys.base_prefix:
        print(f"  . {shlex.quote(str(Path(sys.prefix) / 'bin' / 'activate'))}")
    print(f"  {command}", flush=True)
