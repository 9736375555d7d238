"""One scope per HTTP request: owns every resource of the request and releases it.

vLLM's app drives a request and calls us twice. The scope connects these calls: the outermost middleware opens it, a
context variable carries it, and it is closed exactly once, when the response has completed or failed, or its client has
disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from medialane.core.errors import (
    ClientDisconnected,
    ErrorReport,
    InvalidBody,
    InvalidMediaUrl,
    MedialaneError,
    to_report,
)
from medialane.core.feature import StagedItem
from medialane.core.media import MediaRef
from medialane.core.media_lease import TENANT
from medialane.core.remote_entry import MoverName
from medialane.gateway.bodies import BudgetCharge
from medialane.gateway.references import References
from medialane.gateway.report import EmbeddingOutcome, MediaReport, Sent, media_report, request_report
from medialane.gateway.trace import RequestTrace
from medialane.observability.timeline import StageTimeline

if TYPE_CHECKING:  # admission defers to scopes
    from medialane.gateway.admission import Preparation, Tenant, TtftExpectation

P = ParamSpec("P")
T = TypeVar("T")

_DISCONNECTED = "the client has disconnected"
_NO_OUTCOMES: Mapping[str, EmbeddingOutcome] = MappingProxyType({})


class ExtractedMedia(msgspec.Struct, frozen=True):
    """What intake has found in a request's body: its media, the size of the rest (None if the body was not read by
    intake), whether the client requests a report, the request's priority, and, if the body could not be parsed for
    media, why not."""

    refs: tuple[MediaRef, ...] = ()
    text_bytes: int | None = None
    wants_report: bool = False
    parse_error: str | None = None
    priority: int = 0


class Failure(msgspec.Struct, frozen=True):
    """The error with which a request ends: a report, since an exception would keep the objects of its frames alive.
    With `app_responds`, vLLM's app generates the response."""

    error: ErrorReport
    app_responds: bool


class RequestScope:
    """Owns the resources of one request and releases them in reverse order.

    `memory` is charged by what is made of its media in this process. `references` are those of intake. `client` is the
    digest of the API key that came with it, `tenant` whose that is (`--keys`). `trace` is None unless it is traced.

    `received_at` is when its body had arrived (perf_counter), `ttft_limit_ms` the limit in its header, `expectation`
    when its first token is expected, if there are limits; `preparation` that of its media, if there are queues.

    Also holds results for the response: `extracted` by intake, `failure` (the first one), and for the report the
    prepared items, the destination, and the engine's cached tokens.
    """

    def __init__(self) -> None:
        self.timeline = StageTimeline()
        self.references = References.random()
        self.client = ""
        self.tenant: Tenant | None = None
        self.extracted = ExtractedMedia()
        self.failure: Failure | None = None
        self.received_at = self.timeline.started_at
        self.ttft_limit_ms: float | None = None
        self.expectation: TtftExpectation | None = None
        self.preparation: Preparation | None = None
        self.memory: BudgetCharge | None = None
        self.trace: RequestTrace | None = None
        self._items: tuple[MediaReport, ...] = ()
        self._sent: Sent | None = None
        self._engine_cached_tokens: int | None = None
        self._stack = ExitStack()
        self._closed = False
        self._ended_by: MedialaneError | None = None
        self._waits: set[asyncio.Timeout] = set()

    @property
    def owner(self) -> str:
        """Whose media it may refer to: the tenant's, or those of its API key."""
        return self.client if self.tenant is None else f"{TENANT}{self.tenant.name}"

    @property
    def error_code(self) -> str | None:
        return None if self.failure is None else self.failure.error.code

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has gone before the end of the response."""
        return isinstance(self._ended_by, ClientDisconnected)

    def defer(self, callback: Callable[[], None]) -> None:
        """Call `callback`, which releases a resource, when the scope closes; at once if it is closed already."""
        if self._closed:
            callback()
        else:
            self._stack.callback(callback)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """End the waits of the block, for other processes or for a place, when the client disconnects, or the request
        is given up: raises ClientDisconnected, or that error. Many of vLLM's handlers do not listen for the former."""
        if self._ended_by is not None:
            raise _again(self._ended_by)
        until = asyncio.timeout(None)
        try:
            async with until:
                self._waits.add(until)
                try:
                    yield
                finally:
                    self._waits.discard(until)
        except TimeoutError:
            if until.expired() and self._ended_by is not None:
                raise _again(self._ended_by) from None
            raise

    def disconnect(self) -> None:
        """The client has gone: end every wait for the request, and release everything, although the app still runs."""
        self.give_up(ClientDisconnected(_DISCONNECTED))
        self.close()

    def give_up(self, error: MedialaneError) -> None:
        """End every wait for the request: it raises `error`."""
        self._ended_by = error
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)

    def resolve(self, url: str) -> MediaRef:
        """Return the media reference that intake replaced by `url` in the body. Raises InvalidMediaUrl; InvalidBody if
        intake could not parse the body."""
        number, refs = self.references.number(url), self.extracted.refs
        if self.extracted.parse_error is not None:
            raise InvalidBody(f"media cannot be extracted from this request's JSON: {self.extracted.parse_error}")
        if number is None or number >= len(refs):
            raise InvalidMediaUrl("media are not accepted at this place of the request, or are those of an earlier one")
        return refs[number]

    def quoting_client(self, document: bytes, *, is_error: bool) -> bytes:
        """Return a JSON document of the app with the start of what the client sent instead of references."""
        refs = self.extracted.refs
        return self.references.quoting_client(document, refs, is_error=is_error) if refs else document

    def note_prepared(self, items: Sequence[StagedItem], num_tokens: Sequence[int] = ()) -> None:
        """Record the items of one prompt, and the number of its tokens for each, unless a worker expands it."""
        counts = num_tokens or [0] * len(items)
        self.timeline.note_tokens({item.feature.mm_hash: n for item, n in zip(items, counts, strict=True)})
        if self.extracted.wants_report:
            self._items += tuple(map(media_report, items, counts))

    def note_sent(self, sent: Sent) -> None:
        """Record how and where a prompt is sent. The last call counts: earlier attempts have failed. But of several
        prompts (documents that are scored) one with media counts."""
        if sent.path is not None or self._sent is None or self._sent.path is None:
            self._sent = sent

    def note_answered(
        self,
        num_cached_tokens: int | None,
        outcomes: Mapping[str, EmbeddingOutcome] = _NO_OUTCOMES,
        movers: Sequence[MoverName] = (),
    ) -> None:
        """Record how many of the prompt's tokens the engine had in its KV cache, what it did about embeddings, by the
        mm_hash of the item, and by what the store of the worker's host has copied media."""
        self._engine_cached_tokens = num_cached_tokens
        for timed in self.timeline.items:
            timed.embedding = outcomes.get(timed.mm_hash, timed.embedding)
        if self._sent is not None and movers:
            self._sent = msgspec.structs.replace(self._sent, movers=tuple(movers))
        self._items = tuple(
            msgspec.structs.replace(item, embedding=outcomes.get(item.mm_hash, item.embedding)) for item in self._items
        )

    def report(self) -> bytes:
        """Return the report on the request so far as JSON, items in the order of the request."""
        places = {ref.param: n for n, ref in enumerate(self.extracted.refs)}
        items = tuple(sorted(self._items, key=lambda item: places.get(item.param, len(places))))
        return request_report(items, self._sent, self._engine_cached_tokens, self.timeline)

    def fail(self, error: MedialaneError, *, app_responds: bool = False) -> None:
        """Record `error` as the response. The first one counts: later ones are its consequences, as are those after
        the client has disconnected."""
        if self.failure is None and not self.is_disconnected:
            self.failure = Failure(to_report(error), app_responds)

    def close(self) -> None:
        """Release everything. Idempotent. Also drops the media that came in the body: tasks that still run in the
        request's context keep the scope itself alive."""
        if not self._closed:
            self._closed = True
            self.extracted = ExtractedMedia()
            self._items = ()
            self._stack.close()


_CURRENT: ContextVar[RequestScope] = ContextVar("medialane_request_scope")


def _again(error: MedialaneError) -> MedialaneError:
    """Return an error like it, without its traceback."""
    return type(error)(error.message, param=error.param, retry_after_s=error.retry_after_s)


class OpenRequests:
    """The requests of this process that have not ended."""

    def __init__(self) -> None:
        self._scopes: set[RequestScope] = set()

    @contextmanager
    def opened(self) -> Iterator[RequestScope]:
        """Open the scope of a request, and close it on exit."""
        with open_scope() as scope:
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def __len__(self) -> int:
        return len(self._scopes)

    def give_up(self, error: MedialaneError) -> None:
        """End every wait for any of them."""
        for scope in self._scopes:
            scope.give_up(error)


def current_scope() -> RequestScope:
    """Return the scope of the current request. Raises LookupError outside a request."""
    return _CURRENT.get()


@contextmanager
def open_scope() -> Iterator[RequestScope]:
    """Open the scope of a request and close it on exit."""
    scope = RequestScope()
    token = _CURRENT.set(scope)
    try:
        yield scope
    finally:
        _CURRENT.reset(token)
        scope.close()


def while_connected(method: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Run `method` in `RequestScope.connected` of the current request."""

    @wraps(method)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        async with current_scope().connected():
            return await method(*args, **kwargs)

    return run
