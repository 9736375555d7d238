"""Requests of pathological shapes to every route of the gateway and of the name router in front of it, without a key,
with a wrong one and with a client's, for `--fuzz-seconds`: each is answered, or its connection closed, and none blocks
the event loop for `BLOCKED_S`.

A finding is written to `.fuzz/` and reported with the command that reproduces it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec
import pytest

from medialane.arena import ArenaConfig
from medialane.config import Config
from medialane.gateway import GatewayConfig
from medialane.observability import LoggingConfig
from medialane.prepare import PrepareConfig
from medialane.tools.check import free_port
from waiting import wait_until

#: The clock is `--fuzz-seconds`.
pytestmark = pytest.mark.timeout(0)

HERE = Path(__file__).resolve().parent
FINDINGS = HERE.parents[1] / ".fuzz"
KEYS = {"none": b"", "wrong": b"authorization: Bearer guessed\r\n", "client": b"authorization: Bearer client\r\n"}
ANSWER_S = 30.0
#: Tries of an input that has blocked the loop: garbage collection may come at any.
NUM_TRIES = 3
SIZES = (0, 1, 40, 300, 3000, 8000, 16_000, 60_000)

WORDS = [
    b"a", b"A.", b" ", b"\t", b"=", b";", b"; ", b",", b", ", b" ,", b"&", b"%", b"%25", b"%ff", b"%00", b"/", b"//",
    b"../", b"http://", b"https://a?", b"http://u:p@", b"a@", b"data:", b";base64,", b"://", b":", b"::", b"-",
    b"00-", b"0", b"9", b"f", b"\\", b'"', b'\\"', b"'", b"a=", b"a=b;", b'a="', b"a=b; ", b"$Path=", b"{", b"}", b"{}",
    b"[", b"]",
    b"(", b"<", b"?", b"#", b"*", b"q=0.1,", b"text/", b"*/*;", b"boundary=", b"Bearer ", b"bearer\t", b"1.1 ",
    b"medialane_8000=", b"\xc3\xa9", b"\xff", b"\xe2\x80\xa8", b"xn--", b"--", b"\r\n ", b"model=", b"limit=1&",
]  # fmt: skip
HEADERS = [
    b"host", b"cookie", b"authorization", b"x-request-id", b"traceparent", b"tracestate", b"baggage", b"content-type",
    b"accept", b"accept-encoding", b"accept-language", b"origin", b"referer", b"sec-fetch-site", b"x-forwarded-for",
    b"x-forwarded-proto", b"forwarded", b"via", b"x-real-ip", b"x-medialane-report", b"x-medialane-client", b"expect",
    b"x-llm-d-slo-ttft-ms", b"connection", b"upgrade", b"sec-websocket-key", b"sec-websocket-protocol", b"te", b"range",
    b"sec-websocket-extensions", b"content-encoding", b"user-agent", b"x",
    b"access-control-request-method", b"access-control-request-headers", b"if-none-match", b"last-event-id", b"date",
    b"x-session-id", b"x-data-parallel-rank", b"content-disposition", b"keep-alive", b"proxy-authorization",
]  # fmt: skip
#: Bodies that are parsed before a key is known, or where none is needed.
PARSED = [
    b"cookie",
    b"authorization",
    b"content-type",
    b"tracestate",
    b"x-request-id",
    b"accept",
    b"origin",
    b"host",
    b"expect",
]
#: Of a request that announces another body than it sends: the server waits for the rest.
LENGTHS = [b"content-length", b"transfer-encoding"]
AROUND = [(b"", b""), (b'"', b'"'), (b'a="', b'"'), (b"medialane_0=", b""), (b"multipart/form-data; ", b"")]
TYPES = [
    b"application/json", b"application/json; charset=utf-16", b"text/plain", b"multipart/form-data; boundary=b",
    b"application/x-www-form-urlencoded", b"multipart/form-data", b"application/octet-stream", b"image/png",
]  # fmt: skip
#: Of a gateway behind the name router, which alone sets it.
ROUTERS_OWN = b"x-medialane-client"


class Shapes:
    """Makes requests: the same seed makes the same ones."""

    def __init__(self, seed: int, routes: list[tuple[list[str], str]]) -> None:
        self._random = random.Random(seed)
        self._routes = routes
        self._own = [route for route in routes if route[1].startswith("/medialane")]

    def next(self, *, key: bytes) -> bytes:
        choose = self._random.choice
        methods, path = choose(self._own if self._random.random() < 0.3 else self._routes)
        method = choose(methods) if self._random.random() < 0.8 else choose(["GET", "POST", "PUT", "DELETE", "OPTIONS"])
        target = re.sub(r"{[^}]*}", lambda _: "a", path).encode()
        if "{" in path or self._random.random() < 0.2:
            target = path.partition("{")[0].encode() + _in_target(self.text())
        if self._random.random() < 0.3:
            target += b"?" + choose([b"", b"limit=", b"model=", b"a="]) + _in_target(self.text())
        names = [choose(HEADERS) for _ in range(choose((0, 0, 1, 2, 5, 40, 250)))]
        names += [choose(PARSED)] * (self._random.random() < 0.7) + [choose(LENGTHS)] * (self._random.random() < 0.01)
        lines = [name + b": " + _in_header(self.text()) for name in names]
        body = self.body() if method not in ("GET", "OPTIONS", "HEAD") else b""
        if not any(line.startswith((b"content-length", b"transfer-encoding")) for line in lines):
            lines.append(b"content-length: %d" % len(body))
        if not any(line.startswith(b"content-type") for line in lines):
            lines.append(b"content-type: " + choose(TYPES))
        lines = [line for line in lines if not line.startswith(ROUTERS_OWN)]
        if not any(line.startswith(b"host") for line in lines):
            lines.append(b"host: localhost")
        self._random.shuffle(lines)
        start = method.encode() + b" " + target + b" HTTP/1.1\r\n"
        return start + key + b"connection: close\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body

    def text(self) -> bytes:
        choose = self._random.choice
        size = choose(SIZES)
        words = [choose(WORDS) for _ in range(choose((1, 1, 1, 2, 3)))]
        again = b"".join(words)
        if self._random.random() < 0.3:
            before, after = choose(AROUND)
        else:
            before, after = choose([b"", choose(WORDS)]), choose([b"", b"\0", b"z", choose(WORDS)])
        return before + again * (size // len(again)) + after

    def body(self) -> bytes:
        choose, text = self._random.choice, self.text()
        inner = json.dumps(text.decode("latin-1")).encode()
        depth = choose((10, 100, 5000, 60_000))
        return choose([
            lambda: text,
            lambda: b'{"model":%b,"prompt":"a"}' % inner,
            lambda: b'{"model":"m","messages":[{"role":"user","content":%b}],"max_tokens":1}' % inner,
            lambda: b'{"model":"m","messages":[{"content":[{"type":"image_url","image_url":{"url":%b}}]}]}' % inner,
            lambda: b'{"model":"m","request_id":%b,"cache_salt":%b,"prompt":%b}' % (inner, inner, inner),
            lambda: b'{"key":%b}' % inner,
            lambda: b"[" * depth,
            lambda: b'{"a":' * depth + b"1" + b"}" * depth,
            lambda: b'{"model":"m","a":' + b"[" * depth + b"]" * depth + b"}",
            lambda: b"{" + b",".join(b'"%d":1' % n for n in range(depth)) + b"}",
            lambda: b'{"model":"m","tools":[' + b",".join([b'{"type":"function"}'] * (depth // 20)) + b"]}",
            lambda: b"--b\r\ncontent-disposition: form-data; name=%b\r\n\r\n1\r\n--b--\r\n" % _in_header(text),
            lambda: b"--b\r\n%b: %b\r\n\r\n1\r\n--b--\r\n" % (_in_header(text), _in_header(text)),
            lambda: b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n' + text + b"\r\n--b--\r\n",
            lambda: b"--b\r\n\r\n" * (depth // 10),
            lambda: b"\r\n" * depth,
            lambda: b"a=" + text,
            lambda: b"&" * depth,
        ])()  # fmt: skip


def _is_whole(answer: bytes) -> bool:
    """Whether it is an answer of known length; of a stream, its beginning is enough."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator or head.startswith(b"HTTP/1.1 100"):
        return False
    length = re.search(rb"content-length: (\d+)", head)
    return b"text/event-stream" in head or (length is not None and len(body) >= int(length[1]))


def _in_target(text: bytes) -> bytes:
    return re.sub(rb"[\0-\x20\x7f-\xff]", lambda found: b"%%%02x" % found[0][0], text)


def _in_header(text: bytes) -> bytes:
    return re.sub(rb"[\0\r\n]", b" ", text)


class Server:
    """The process of `http_program`; requests to it are sent to the gateway's socket, or to the name router's port."""

    def __init__(self, folder: Path, port: int) -> None:
        self._places: list[tuple[socket.AddressFamily, object]] = [
            (socket.AF_UNIX, str(folder / "gateway")),
            (socket.AF_INET, ("127.0.0.1", port)),
        ]
        self._blocked = folder / "blocked"
        self._seen = 0

    def ask(self, request: bytes, place: int) -> bytes:
        """Return the answer, as far as there is one. Raises TimeoutError if nothing comes."""
        family, address = self._places[place]
        answer = bytearray()
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(address)
            with suppress(ConnectionError):
                connection.sendall(request)
            with suppress(ConnectionError):
                while not _is_whole(answer) and (piece := connection.recv(1 << 16)):
                    answer += piece
        return bytes(answer)

    def blocked(self) -> str:
        """Return what has blocked the loop since this was asked last."""
        if not self._blocked.exists() or (size := self._blocked.stat().st_size) == self._seen:
            return ""
        new, self._seen = self._blocked.read_text()[self._seen :], size
        return new


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = Path(tmp_path_factory.mktemp("http"))
    config = Config(
        gateway=GatewayConfig(
            api_keys=("client",),
            admin_key="admin",
            # Many inputs announce more than they send.
            header_timeout_s=1.0,
            body_timeout_s=0.5,
            min_body_rate_grace_s=0.5,
        ),
        prepare=PrepareConfig(num_preparers=1),
        arena=ArenaConfig(size_bytes=64 << 20),
        logging=LoggingConfig(access=True),
    )
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    port = free_port()
    path = [str(HERE), str(HERE.parent / "hostile"), str(HERE.parent)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    command = [sys.executable, str(HERE / "http_program.py"), str(tiny_model), str(port), str(folder)]
    flags = ["--max-model-len=8192", "--enforce-eager", "--skip-mm-profiling", "--enable-scale-out"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, *flags], env=environ, stdout=log, stderr=log)
    server = Server(folder, port)

    def is_ready() -> bool:
        assert process.poll() is None, _tail(folder)
        with suppress(OSError):
            return server.ask(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n", 1)[9:12] == b"200"
        return False

    try:
        wait_until(is_ready, "the gateway is ready", 300, more=lambda: _tail(folder))
        server.blocked()  # of the start
        yield server, folder
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")[-3000:]


def _inputs(shapes: Shapes, seconds: float, only: Path | None) -> Iterator[tuple[bytes, int]]:
    if only is not None:
        yield from ((only.read_bytes(), place) for place in (0, 1))
        return
    until = time.monotonic() + seconds
    for key, place in itertools.cycle(itertools.product(KEYS.values(), (0, 1))):
        if time.monotonic() > until:
            return
        yield shapes.next(key=key), place


def _fault(server: Server, request: bytes, place: int) -> str:
    answer = None
    for _ in range(2):  # a machine with other work may stop for as long, once
        with suppress(TimeoutError):
            answer = server.ask(request, place)
            break
    if answer is None:
        return f"no answer in {ANSWER_S:g} s"
    return f"status 500: {answer[-300:]!r}" if answer[9:12] == b"500" else ""


def _blocks(server: Server, request: bytes, place: int) -> str:
    """Return what blocks the loop at every try."""
    found = ""
    for _ in range(NUM_TRIES):
        with suppress(TimeoutError):
            server.ask(request, place)
        time.sleep(0.1)  # time: the callback that answers ends after the answer
        if not (found := server.blocked()):
            return ""
    return f"the event loop is blocked: {found}"


def test_no_request_without_the_operators_key_blocks_the_event_loop(
    server: tuple[Server, Path], fuzz_seconds: float, fuzz_seed: int, fuzz_input: Path | None
):
    asked, folder = server
    routes = [(methods, path) for methods, path in json.loads((folder / "routes").read_text())]
    assert len(routes) > 70
    last: tuple[bytes, int] | None = None
    number = 0
    for number, tried in enumerate(_inputs(Shapes(fuzz_seed, routes), fuzz_seconds, fuzz_input), 1):
        fault = _fault(asked, *tried)
        suspects = [each for each in (tried, last) if each is not None] if fuzz_input or asked.blocked() else []
        faults = {tried: fault} | {each: blocks for each in suspects if (blocks := _blocks(asked, *each))}
        for (request, place), found in faults.items():
            if found:
                _report(found, request, place, number)
        last = tried
    assert number, "no request was sent"


def _report(fault: str, request: bytes, place: int, number: int) -> None:
    FINDINGS.mkdir(exist_ok=True)
    file = FINDINGS / f"http-{blake2b(request, digest_size=6).hexdigest()}"
    file.write_bytes(request)
    again = f"pytest tests/fuzz/test_fuzz_http.py --fuzz-input {file.relative_to(FINDINGS.parent)}"
    where = ("gateway", "router")[place]
    pytest.fail(f"{fault}\nat the {where}, request {number}: {request[:300]!r}\nagain: {again}", pytrace=False)
