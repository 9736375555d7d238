"""One scope per HTTP request: owns every resource of the request and releases it.

vLLM's app drives a request, and calls us up to twice: to prepare its media, and to generate. The scope connects these
calls: the outermost middleware opens it, a context variable carries it, and it is closed exactly once, when the
response has completed or failed, or its client has disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec
from msgspec.structs import replace

from medialane.gateway.intake import BudgetCharge, ExtractedMedia
from medialane.gateway.intake.places import References
from medialane.gateway.records import RequestRecord, RequestTrace
from medialane.gateway.workers.client import RemoteRequest
from medialane.types.errors import (
    ClientDisconnected,
    ErrorReport,
    InvalidBody,
    InvalidMediaUrl,
    MedialaneError,
    to_report,
)
from medialane.types.hashing import owner_salt
from medialane.types.media import MediaRef
from medialane.types.media_lease import TENANT

if TYPE_CHECKING:
    from medialane.gateway.admission import Flow, Preparation, Tenant


P = ParamSpec("P")

T = TypeVar("T")

_DISCONNECTED = "the client has disconnected"


class Failure(msgspec.Struct, frozen=True):
    """The error with which a request ends: a report, since an exception would keep the objects of its frames alive.
    With `app_responds`, vLLM's app generates the response."""

    error: ErrorReport
    app_responds: bool


class RequestScope:
    """Owns the resources of one request and releases them in reverse order.

    `memory` is charged by what is made of its media in this process. `references` come from intake. `client` is the
    digest of the API key that came with it, `tenant` whose that is (`--keys`). With `has_own_cache` it finds only what
    requests of its owner have cached. `trace` is None unless it is traced. `remote` was sent to a worker last.

    `is_refused` is whether it had no key that suffices, or came from another site's page: then only the log
    mentions it.

    `received_at` is when its body had arrived (perf_counter), `ttft_limit_ms` the limit in its header. If there are
    queues, it is one of the requests of `flow` there, unless it `passes_by`, `preparation` is that of its media, and
    `end_turn` ends its turn to be rendered, if it has one. Idempotent.

    Also holds results for the response: `extracted` by intake, `failure` (the first one). `record` is what remains of
    the request, and its report is made of it.
    """

    def __init__(self) -> None:
        self.record = RequestRecord()
        self.timeline = self.record.timeline
        self.references = References.random()
        self.asks_report = False
        self.is_refused = False
        self.client = ""
        self.tenant: Tenant | None = None
        self.has_own_cache = False
        self.extracted = ExtractedMedia()
        self.failure: Failure | None = None
        self.received_at = self.timeline.started_at
        self.ttft_limit_ms: float | None = None
        self.passes_by = True
        self.flow: Flow | None = None
        self.preparation: Preparation | None = None
        self.end_turn: Callable[[], None] = lambda: None
        self.memory: BudgetCharge | None = None
        self.trace: RequestTrace | None = None
        self.remote: RemoteRequest | None = None
        self._deferred: list[Callable[[], None]] = []
        self._closed = False
        self._ended_by: MedialaneError | None = None
        self._waits: set[asyncio.Timeout] = set()

    @property
    def owner(self) -> str:
        """Whose media it may refer to: the tenant's, or its API key's."""
        return self.client if self.tenant is None else f"{TENANT}{self.tenant.name}"

    def salt(self, given: str | None) -> str | None:
        """Return the salt of what the request caches and finds, for the `cache_salt` that its client has given."""
        return owner_salt(self.owner, given or "") if self.has_own_cache else given

    @property
    def text_salt(self) -> str | None:
        """The salt of what its text caches and finds; None if intake has not parsed its body."""
        is_unknown = self.extracted.text_bytes is None or self.extracted.parse_error is not None
        return None if is_unknown else self.salt(self.extracted.cache_salt) or ""

    def owned(self, ref: MediaRef) -> MediaRef:
        """Return a reference of the request's body as one of its owner."""
        alias = None if ref.alias is None else replace(ref.alias, owner=self.owner)
        return replace(ref, owner=self.owner, alias=alias, salt=self.salt(ref.salt) or "")

    @property
    def wants_report(self) -> bool:
        """Whether the client requests a report, by the body or (`asks_report`) by a header."""
        return self.asks_report or self.extracted.wants_report

    @property
    def error_code(self) -> str | None:
        return None if self.failure is None else self.failure.error.code

    def defer(self, callback: Callable[[], None]) -> None:
        """Call `callback`, which releases a resource, when the scope closes; at once if it is closed already."""
        if self._closed:
            callback()
        else:
            self._deferred.append(callback)

    def release(self, callback: Callable[[], None]) -> None:
        """Call `callback`, which was deferred, now and not when the scope closes: of many attempts only the last holds
        anything."""
        for at in reversed(range(len(self._deferred))):
            if self._deferred[at] == callback:
                del self._deferred[at]
                break
        callback()

    def connected(self) -> AbstractAsyncContextManager[None]:
        """End the waits of the block, for other processes or for a place, when the client disconnects, or the request
        is given up: raises ClientDisconnected, or that error. Many of vLLM's handlers do not listen for the former."""
        return _Connected(self)

    def wait_begins(self, wait: asyncio.Timeout) -> None:
        """End `wait` once the request ends. Raises its error if it has ended."""
        if self._ended_by is not None:
            raise _again(self._ended_by)
        self._waits.add(wait)

    def wait_ended(self, wait: asyncio.Timeout) -> MedialaneError | None:
        """Return the error with which the request has ended meanwhile."""
        self._waits.discard(wait)
        return None if self._ended_by is None else _again(self._ended_by)

    def disconnect(self) -> None:
        """The client has gone: end every wait for the request, and release everything, although the app still runs."""
        self.give_up(ClientDisconnected(_DISCONNECTED))
        self.close()

    def give_up(self, error: MedialaneError) -> None:
        """End every wait for the request: it raises `error`. One that is being ended already cannot be rescheduled."""
        self._ended_by = error
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(now)

    def resolve(self, url: str) -> MediaRef:
        """Return the media reference that intake replaced by `url` in the body. Raises InvalidMediaUrl; InvalidBody if
        intake could not parse the body."""
        number, refs = self.references.number(url), self.extracted.refs
        if self.extracted.parse_error is not None:
            raise InvalidBody(f"media cannot be extracted from this request's JSON: {self.extracted.parse_error}")
        if number is None or number >= len(refs):
            raise InvalidMediaUrl("media are not accepted at this place of the request, or belong to an earlier one")
        return refs[number]

    def quoting_client(self, document: bytes, *, is_error: bool) -> bytes:
        """Return a JSON document of the app with the start of what the client sent instead of references."""
        refs = self.extracted.refs
        return self.references.quoting_client(document, refs, is_error=is_error) if refs else document

    def fail(self, error: MedialaneError, *, app_responds: bool = False) -> None:
        """Record `error` as the response. The first one counts: later ones are its consequences, as are errors after
        the client has disconnected."""
        if self.failure is None and not isinstance(self._ended_by, ClientDisconnected):
            self.failure = Failure(to_report(error), app_responds)
            self.record.failed(self.failure.error, quotes_client=app_responds)

    def close(self) -> None:
        """Release everything. Idempotent. Also drops the media that came in the body: tasks that still run in the
        request's context keep the scope itself alive."""
        if not self._closed:
            self._closed = True
            self.extracted = ExtractedMedia()
            deferred, self._deferred = self._deferred, []
            with ExitStack() as stack:
                for callback in deferred:
                    stack.callback(callback)


class _Connected:
    """The block of `RequestScope.connected`; a request has several. Not a generator, which would double its cost."""

    def __init__(self, scope: RequestScope) -> None:
        self._scope = scope
        self._until = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        self._scope.wait_begins(self._until)
        await self._until.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_by = self._scope.wait_ended(self._until)
        try:
            await self._until.__aexit__(kind, error, trace)
        except TimeoutError:
            if ended_by is None:
                raise
            raise ended_by from None


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
