"""What watches a server in production, for `medialane bench NAME --observed`: an open page, a log of requests as JSON
lines, and the spans of a tenth of the requests.

Those that receive it run in the benchmark's process, read little and keep nothing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from medialane.observability import LoggingConfig

#: A tenth of the requests.
SAMPLED = {
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.1",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
}
LOGGING = LoggingConfig(format="json", access=True)
_LOGGING_SETTINGS = ("--access-log", "--log-format", "json")

_CONNECT_S = 10.0
_STREAM = "GET /medialane/state/stream HTTP/1.1\r\nhost: {host}\r\naccept: text/event-stream\r\n\r\n"


@dataclass(frozen=True)
class Observers:
    """What a server is started with. Without `is_on` nothing is added, and nothing watches it."""

    is_on: bool
    settings: Sequence[str] = ()
    flags: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def watching(self, base_url: str) -> Iterator[None]:
        """Keep the page of this server open. Raises OSError, and RuntimeError if the page has lost its connection."""
        with _page(base_url) if self.is_on else nullcontext():
            yield


@contextmanager
def start_observers(*, is_on: bool) -> Iterator[Observers]:
    """Start what receives spans."""
    with collector() if is_on else nullcontext("") as url:
        if is_on:
            yield Observers(True, _LOGGING_SETTINGS, ("--otlp-traces-endpoint", url), SAMPLED)
        else:
            yield Observers(False)


@contextmanager
def collector() -> Iterator[str]:
    """Accept spans over HTTP, unread; return the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()


@contextmanager
def _page(base_url: str) -> Iterator[None]:
    """Read the events of an open page. Raises RuntimeError if the server ends them, or has sent none."""
    host, num_bytes, is_closing = urlsplit(base_url).netloc, [0], threading.Event()
    name, _, port = host.rpartition(":")
    with socket.create_connection((name, int(port)), timeout=_CONNECT_S) as connection:
        connection.settimeout(None)
        connection.sendall(_STREAM.format(host=host).encode())

        def read() -> None:
            with contextlib.suppress(OSError):
                while data := connection.recv(1 << 18):
                    num_bytes[0] += len(data)
            if not is_closing.is_set():
                num_bytes[0] = 0

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        yield
        is_closing.set()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        thread.join(_CONNECT_S)
    if not num_bytes[0]:
        raise RuntimeError("the page that was open has had no events, or has lost its connection")
