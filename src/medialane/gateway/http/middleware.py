"""ASGI middleware in front of vLLM's app: the scope of every request, and the intake that extracts media from bodies.

Order matters. `ScopeMiddleware` is the outermost, so it sees the end of every request, however it ends.
`IntakeMiddleware` is the innermost, behind `access.AccessMiddleware` and CORS: no body is read of a client that may not
ask, nor of a request that no route serves.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from medialane.gateway.admission import Queues
from medialane.gateway.config import GatewayConfig
from medialane.gateway.http.access import FILES_PATH, MEDIA_PATH, given_key
from medialane.gateway.http.responses import (
    REQUEST_ID,
    ErrorSender,
    IdentifiedSend,
    error_form,
    given_id,
    given_trace,
    header,
    send_error,
    usable_id,
    with_id,
)
from medialane.gateway.intake import (
    WITHOUT_BODY,
    BodyBuffer,
    BodyMemory,
    BoundedReceive,
    BudgetCharge,
    Buffer,
    ExtractedMedia,
    extract,
    extract_files,
    is_multipart,
    replay,
    with_pages,
)
from medialane.gateway.records import (
    RecentRequests,
    Recordable,
    Recorder,
    ReportSender,
    RequestTracing,
    log_end,
    request_report,
)
from medialane.gateway.request.scope import OpenRequests, RequestScope, current_scope
from medialane.media import MediaConfig
from medialane.observability.logging import request_id, trace_id
from medialane.observability.metrics import Metrics
from medialane.runtime.tasks import TAKER, LoopFairness, gather_or_cancel
from medialane.types.errors import BodyTooLarge, ClientDisconnected, InvalidRequest, MedialaneError
from medialane.types.media import MODALITIES, DocumentOptions, MediaRef, OpenedDocument

if TYPE_CHECKING:  # types only: starlette is installed with vLLM
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

#: For a handler that is cancelled to end its work.
_OWN_END_S = 0.02

#: llm-d's name of a request's longest time to first token.
TTFT_HEADER = b"x-llm-d-slo-ttft-ms"

#: Requests a report, as does the body's member `medialane`.
REPORT_HEADER = b"x-medialane-report"

#: Has the store open a document of the current request. Raises MedialaneError, which names its field, and
#: ClientDisconnected.
OpenDocument = Callable[[MediaRef, DocumentOptions], Coroutine[object, object, OpenedDocument]]

_BOOLEANS = {b"true": True, b"1": True, b"false": False, b"0": False}


class ScopeMiddleware:
    """Opens the request's scope, adds its id and Server-Timing, observes the timeline, closes the scope. With
    `names_takers`, what is held for a request is recorded with its id; with `logs_requests` its end is logged. Without
    `tracing`, requests are not traced, without `recorder` not recorded. `model` is the name for errors about others."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        requests: OpenRequests | None = None,
        recent: RecentRequests | None = None,
        *,
        names_takers: bool = False,
        logs_requests: bool = False,
        tracing: RequestTracing | None = None,
        recorder: Recorder | None = None,
        model: str = "",
    ) -> None:
        self._app = app
        self._model = model
        self._recorder = recorder
        self._tracing = tracing
        self._metrics = metrics
        self._requests = requests or OpenRequests()
        self._recent = recent or RecentRequests()
        self._names_takers = names_takers
        self._logs_requests = logs_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._requests.opened() as request:
            record = request.record
            record.id = usable_id(given_id(scope))
            tokens = request_id.set(record.id), trace_id.set(self._traced(scope, request))
            if self._names_takers:
                TAKER.set(f"{scope['method']} {scope['path']} {record.id}")
            watched = _WatchedEnd(receive, IdentifiedSend(send, record.id, self._model), request)
            is_kept = scope["method"] not in WITHOUT_BODY
            if is_kept:
                self._recent.begin(record)
            try:
                if any(name == REQUEST_ID for name, _ in scope["headers"]):  # perhaps with an unusable one
                    scope = with_id(scope, record.id)
                await self._app(scope, watched.receive, watched.send)
            finally:
                record.ended(is_disconnected=not watched.is_complete and watched.is_disconnected)
                self._ended(scope, request, is_kept=is_kept)
                request_id.reset(tokens[0])
                trace_id.reset(tokens[1])

    def _ended(self, scope: Scope, request: RequestScope, *, is_kept: bool) -> None:
        """Pass the record of a request that has ended, before its scope is closed, to all that make something of it."""
        record = request.record
        if is_kept:
            self._recent.end(record, is_refused=request.is_refused)
        if request.trace is not None and not request.is_refused:  # a span that does not end is not sent
            request.trace.end()
        if scope["method"] == "POST" and not request.is_refused:  # health checks and scrapes are not counted
            self._metrics.observe(request.timeline, record.ttft_ms)
            if record.num_documents:
                self._metrics.documents.inc(record.num_documents)
                for page in chain.from_iterable(record.documents.values()):
                    self._metrics.document_pages.labels(page.outcome or "failed").inc()
        if request.error_code is not None:
            self._metrics.request_errors.labels(request.error_code).inc()
        if self._recorder is not None and (body := request.extracted.body):
            content_type = header(scope, b"content-type")
            self._recorder.offer(Recordable(body, request.extracted.refs, request.references, content_type, record))
        if self._logs_requests:
            log_end(scope["method"], scope["path"], record)

    def _traced(self, scope: Scope, request: RequestScope) -> str:
        """Begin the request's trace, if it has one; return the id of that, or of its client's."""
        if self._tracing is not None:
            request.trace = self._tracing.begin(scope, request.record)
        return given_trace(scope) if request.trace is None else request.trace.trace_id


class _WatchedEnd:
    """The client's side of a request: adds Server-Timing, and notes the status and who ended it."""

    def __init__(self, receive: Receive, send: Send, request: RequestScope) -> None:
        self._receive = receive
        self._send = send
        self._request = request
        self.is_complete = False
        self.is_disconnected = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_disconnected = True
        return message

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            if not self.is_disconnected:  # nobody gets what the app still sends
                self._request.record.status = message["status"]
            timing = self._request.timeline.server_timing().encode()
            message = {**message, "headers": [*message.get("headers", ()), (b"server-timing", timing)]}
        elif message["type"] == "http.response.body" and not self.is_disconnected:
            self.is_complete = not message.get("more_body", False)
        return self._send(message)  # no coroutine of its own: this costs each token of every stream


class IntakeMiddleware:
    """Passes JSON bodies and forms to the app without their media. Every body is read within its limits.

    As the innermost middleware, it also replaces the app's responses to our errors, and adds the report to responses
    for which the client requested one, before any other middleware compresses them. Documents are opened here, all of a
    request at once: the app gets their pages.

    If a client disconnects while it sends, the request ends: the app never sees an incomplete body. If it disconnects
    later, the request's scope ends whatever the request waits for.
    """

    def __init__(
        self,
        app: ASGIApp,
        media: MediaConfig,
        config: GatewayConfig,
        fairness: LoopFairness,
        *,
        queues: Queues | None = None,
        open_document: OpenDocument | None = None,
        keeps_bodies: bool = False,
    ) -> None:
        """`queues` are what clients' requests wait in. Without `open_document`, documents are refused. With
        `keeps_bodies`, what is left of a body stays with its request until that ends, to be recorded."""
        self._app = app
        self._keeps_bodies = keeps_bodies
        self._media = media
        self._config = config
        self._fairness = fairness
        self._queues = queues
        self._open_document = open_document
        self._memory = BodyMemory(
            config.max_bodies_bytes, tenant_share=config.tenant_share, least_share=media.max_body_bytes
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content_type = header(scope, b"content-type")
        is_streamed = _is_streamed(scope)
        is_read_here = scope["method"] not in WITHOUT_BODY and not (is_streamed or _is_urlencoded(content_type))
        limit = self._media.max_body_bytes if is_read_here else self._config.max_text_bytes
        if is_streamed:
            limit = max(self._media.fetch_limits(modality).max_bytes for modality in MODALITIES)
        request, form = current_scope(), error_form(scope)
        request.client = given_key(scope).hex()
        tenant = "" if request.tenant is None else request.tenant.name
        request.memory = charge = BudgetCharge(self._memory, tenant)
        request.defer(charge.release)
        try:
            request.asks_report = _asks_report(scope)
            request.ttft_limit_ms = _own_ttft_limit(scope) if self._config.trust_headers else None
            declared = _check_declared(scope, limit)
            incoming = BoundedReceive(receive, limit, charge, self._config, keeps=not is_streamed)
            # This frame lives as long as the response, so it must not hold the original body.
            body = await self._extract(incoming, declared, charge, content_type) if is_read_here else None
        except MedialaneError as error:
            request.fail(error)
            await send_error(_reporting(send, request), error, form)
            return
        watching: AbstractContextManager[None] = nullcontext()
        if not is_read_here:
            receive = _recording_errors(incoming, request)
        elif body is None:
            return
        else:
            send = _reporting(send, request)
            watching = _ending_with_client(receive, request)
            if not request.extracted.has_id and not header(scope, REQUEST_ID):  # which would replace the body's
                scope = with_id(scope, request.record.id)
            scope, receive = _for_app(scope, len(body)), replay(body, receive)
        sender = ErrorSender(send, request, form)
        try:
            with watching:
                await self._app(scope, receive, sender)
        except ClientDisconnected as error:
            await sender.end(error)
        except Exception as error:  # replaced if the request has failed with our error; any other is raised
            if not await sender.fail_stream(error):
                raise

    async def _extract(
        self, receive: Receive, declared: int, charge: BudgetCharge, content_type: bytes
    ) -> bytes | None:
        """Return the body without its media, which move to the request's scope. None if the client has disconnected."""
        request = current_scope()
        queues = None if request.passes_by else self._queues
        if queues is not None:
            queues.arrive(request, num_bytes=declared)
        body = BodyBuffer(self._memory, declared)
        with request.timeline.measure("upload"):
            is_whole = await body.read(receive, self._fairness)
        request.timeline.enter("intake")
        if not is_whole:
            body.release()
            return None
        work = partial(self._work, body.buffer, body.size, request, content_type)
        intake = await self._fairness.run(body.size, work)
        body.release()
        charge.set(intake.num_bytes)
        request.received_at = time.perf_counter()
        num_documents = len(intake.documents)
        intake = msgspec.structs.replace(intake, refs=tuple(map(request.owned, intake.refs)))
        if intake.documents:
            try:
                intake = await self._opened(intake, receive, request)
            except ClientDisconnected:
                return None
            charge.set(intake.num_bytes)
        request.extracted = msgspec.structs.replace(
            intake,
            text_bytes=len(intake.body),
            body=intake.body if self._keeps_bodies else b"",
        )
        request.record.received(intake.refs, model=intake.model, streams=intake.stream, num_documents=num_documents)
        if queues is not None:
            queues.received(request)
            if not intake.refs:
                await queues.render(request)
        request.timeline.enter("parse")
        return intake.body

    async def _opened(self, intake: ExtractedMedia, receive: Receive, request: RequestScope) -> ExtractedMedia:
        """Return what was extracted with the pages of its documents. Raises MedialaneError."""
        if self._open_document is None:
            message = "documents are not supported by this server: its model takes no images"
            raise InvalidRequest(message, param=intake.documents[0].ref.param)
        with request.timeline.measure("open"), _ending_with_client(receive, request):
            opened = await gather_or_cancel(
                [self._open_document(intake.refs[sent.number], sent.options) for sent in intake.documents]
            )
        num_bytes = len(intake.body) + sum(len(page.text) for document in opened for page in document.pages)
        work = partial(with_pages, intake, opened, self._media, self._config, references=request.references)
        with request.timeline.measure("intake"):
            return await self._fairness.run(num_bytes, work)

    def _work(self, buffer: Buffer, size: int, request: RequestScope, content_type: bytes) -> ExtractedMedia:
        with request.timeline.measure("intake"):
            if is_multipart(content_type):
                are_kept, references = request.record.path == FILES_PATH, request.references
                return extract_files(
                    buffer, content_type, self._media, self._config, references=references, size=size, are_kept=are_kept
                )
            return extract(buffer, self._media, self._config, references=request.references, size=size)


@contextmanager
def _ending_with_client(receive: Receive, request: RequestScope) -> Iterator[None]:
    """Cancel the block if the client disconnects during it, and raise ClientDisconnected. If it then goes on, what it
    waits for ends by the request's scope. `receive` has returned the body."""
    block = asyncio.current_task()
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        if block is not None:
            has_left = block.cancel()
        await asyncio.sleep(_OWN_END_S)
        request.disconnect()

    watching = asyncio.get_running_loop().create_task(watch(), name="client-watch")
    try:
        yield
    except asyncio.CancelledError:
        if not has_left or block is None or block.cancelling() > 1:
            raise
        raise ClientDisconnected("the client has disconnected") from None
    finally:
        watching.cancel()
        if has_left and block is not None:
            block.uncancel()


def _reporting(send: Send, request: RequestScope) -> Send:
    """Return a `send` that adds the report to the answer, if the client requests one."""
    return ReportSender(send, partial(request_report, request.record)) if request.wants_report else send


def _recording_errors(receive: Receive, request: RequestScope) -> Receive:
    """Return a `receive` that records errors in the scope before raising them: the app would turn them all into 400."""

    async def recording() -> Message:
        try:
            return await receive()
        except MedialaneError as error:
            request.fail(error)
            raise

    return recording


def _is_streamed(scope: Scope) -> bool:
    """Return whether the body are media, which the handler reads as they arrive."""
    path: str = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    return scope["method"] == "PUT" and path == MEDIA_PATH


def _is_urlencoded(content_type: bytes) -> bool:
    """Return whether the body is a form without files. Any body that is not a form may be JSON: some of vLLM's handlers
    parse JSON regardless of the content type."""
    return content_type.lower().startswith(b"application/x-www-form-")


def _own_ttft_limit(scope: Scope) -> float | None:
    """Return the request's own limit of the time to first token, in ms. Raises InvalidRequest."""
    if not (value := header(scope, TTFT_HEADER)):
        return None
    try:
        limit = float(value)
    except ValueError:
        limit = 0.0
    if not 0 < limit < math.inf:
        raise InvalidRequest(f"{TTFT_HEADER.decode()} must be a positive number of milliseconds")
    return limit


def _asks_report(scope: Scope) -> bool:
    """Return whether the client requests a report by a header. Raises InvalidRequest."""
    value = (header(scope, REPORT_HEADER) or b"false").strip().lower()
    if value not in _BOOLEANS:
        raise InvalidRequest(f"{REPORT_HEADER.decode()} must be true or false")
    return _BOOLEANS[value]


def _check_declared(scope: Scope, limit: int) -> int:
    """Return Content-Length, or 0 if there is none. Raises BodyTooLarge before anything is read."""
    declared = header(scope, b"content-length")
    length = int(declared) if declared.isdigit() else 0
    if length > limit:
        raise BodyTooLarge(f"the request body has {length} bytes, more than {limit}")
    return length


def _for_app(scope: Scope, length: int) -> Scope:
    """Return the scope with the length of the body that the app gets. With ASGI 2.4, Starlette's streams do not listen
    for the client's disconnect, which takes two tasks each: `_ending_with_client` does."""
    headers = [(k, v) for k, v in scope["headers"] if k not in (b"content-length", b"transfer-encoding")]
    asgi = {**scope.get("asgi", {}), "spec_version": "2.4"}
    return {**scope, "asgi": asgi, "headers": [*headers, (b"content-length", str(length).encode())]}
