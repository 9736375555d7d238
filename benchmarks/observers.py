"""What watches a server in production, for `medialane bench NAME --observed`: an open page, a log of requests as JSON
lines, and the spans of a tenth of the requests.

Its receivers run in the benchmark's process, read little and keep nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
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

_TIMEOUT_S = 10.0
#: As the page asks.
_INTERVAL_S = 1.0


@dataclass(frozen=True)
class Observers:
    """What a server is started with. Without `is_on` nothing is added, and nothing watches it."""

    is_on: bool
    settings: Sequence[str] = ()
    flags: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def watching(self, base_url: str) -> Iterator[None]:
        """Keep the page of this server open. Raises RuntimeError if the page has had no answer."""
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
    """Ask for the state as an open page does. Raises RuntimeError if the server does not answer once."""
    problems, is_closing = list[str](), threading.Event()

    def ask() -> None:
        with contextlib.closing(HTTPConnection(urlsplit(base_url).netloc, timeout=_TIMEOUT_S)) as connection:
            while not is_closing.wait(_INTERVAL_S):
                try:
                    connection.request("GET", "/medialane/state")
                    response = connection.getresponse()
                    response.read()
                except (OSError, HTTPException) as error:
                    problems.append(repr(error))
                    return
                if response.status != 200:
                    problems.append(f"status {response.status}")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    yield
    is_closing.set()
    thread.join(_TIMEOUT_S)
    if problems:
        raise RuntimeError(f"the page that was open has had no answer: {problems[0]}")
