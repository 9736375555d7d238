"""One scope per HTTP request: everything that the request takes is taken through it and ends with it.

vLLM's app drives a request, so our steps run inside two of its calls. The scope is what ties them together: the
outermost middleware opens it, a context variable carries it, and it closes exactly once, when the response has ended,
failed or lost its client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Protocol

import msgspec

from medialane.core.errors import ErrorReport, InvalidBody, InvalidMediaUrl, MedialaneError, to_report
from medialane.core.feature import StagedItem
from medialane.core.media import MediaRef
from medialane.gateway.report import MediaReport, Sent, media_report, request_report
from medialane.observability.timeline import StageTimeline

#: What intake puts in place of a media URL: the scheme, then the reference's number in the scope.
REFERENCE_SCHEME = "medialane:"


class Releasable(Protocol):
    def release(self) -> None: ...


class ExtractedMedia(msgspec.Struct, frozen=True):
    """What intake has found in a request's body: its media, whether the client asks for a report, and why no media
    could be looked for where the body is of another form."""

    refs: tuple[MediaRef, ...] = ()
    wants_report: bool = False
    parse_error: str | None = None


class Failure(msgspec.Struct, frozen=True):
    """What a request is answered with: a report, since an exception would keep what its frames hold. With
    `app_responds`, vLLM's app words the answer."""

    error: ErrorReport
    app_responds: bool


class RequestScope:
    """What one request holds, and the one place where that ends. Resources are released in the reverse order of taking.

    Beside them, what each step leaves for the answer: `extracted` by intake, `failure` by whatever failed first, and
    for the report the items that were prepared, where they were sent, and what the engine had of the prompt.
    """

    def __init__(self) -> None:
        self.timeline = StageTimeline()
        self.extracted = ExtractedMedia()
        self.failure: Failure | None = None
        self._items: tuple[MediaReport, ...] = ()
        self._sent: Sent | None = None
        self._engine_cached_tokens: int | None = None
        self._stack = ExitStack()
        self._closed = False

    @property
    def error_code(self) -> str | None:
        return None if self.failure is None else self.failure.error.code

    def take(self, resource: Releasable) -> None:
        """Own `resource` until the scope closes. A resource that comes too late is released at once."""
        if self._closed:
            resource.release()
        else:
            self._stack.callback(resource.release)

    def resolve(self, url: str) -> MediaRef:
        """The media reference that intake left as `url` in the body. Raises InvalidMediaUrl; InvalidBody where intake
        could not read the body.

        Where a client sends bare base64 (`input_audio`, an Anthropic image), vLLM's app makes a data: URL of what
        stands in its place: `data:audio/wav;base64,medialane:0`.
        """
        if url.startswith("data:"):
            url = url.rpartition(";base64,")[2]
        number = url.removeprefix(REFERENCE_SCHEME)
        refs = self.extracted.refs
        if self.extracted.parse_error is not None:
            raise InvalidBody(f"media cannot be extracted from this request's JSON: {self.extracted.parse_error}")
        if not url.startswith(REFERENCE_SCHEME) or not number.isdecimal() or int(number) >= len(refs):
            raise InvalidMediaUrl("unknown internal media reference")
        return refs[int(number)]

    def note_prepared(self, items: Sequence[StagedItem], num_tokens: Sequence[int] = ()) -> None:
        """The items of one prompt, and how many of its tokens stand for each, unless a worker shall expand it."""
        if self.extracted.wants_report:
            counts = num_tokens or [0] * len(items)
            self._items += tuple(map(media_report, items, counts))

    def note_sent(self, sent: Sent) -> None:
        """Where a request goes, and how. The last one counts: it is the one that worked."""
        self._sent = sent

    def note_answered(self, num_cached_tokens: int | None) -> None:
        """How many of the prompt's tokens the engine found in its cache."""
        self._engine_cached_tokens = num_cached_tokens

    def report(self) -> bytes:
        """JSON of what was used for the request so far, the items in the order of the request."""
        places = {ref.param: n for n, ref in enumerate(self.extracted.refs)}
        items = tuple(sorted(self._items, key=lambda item: places.get(item.param, len(places))))
        return request_report(items, self._sent, self._engine_cached_tokens, self.timeline)

    def fail(self, error: MedialaneError, *, app_responds: bool = False) -> None:
        """Remember that the request is answered with `error`. The first one counts: others follow from it."""
        if self.failure is None:
            self.failure = Failure(to_report(error), app_responds)

    def close(self) -> None:
        """Release everything. Idempotent. Media that came inside the request are let go of: whatever still runs in
        the request's context keeps the scope itself."""
        if not self._closed:
            self._closed = True
            self.extracted = ExtractedMedia()
            self._items = ()
            self._stack.close()


_CURRENT: ContextVar[RequestScope] = ContextVar("medialane_request_scope")


def current_scope() -> RequestScope:
    """The scope of the request that this code runs for. Raises LookupError outside of one."""
    return _CURRENT.get()


@contextmanager
def open_scope() -> Iterator[RequestScope]:
    """Open the scope of a request and close it on leaving."""
    scope = RequestScope()
    token = _CURRENT.set(scope)
    try:
        yield scope
    finally:
        _CURRENT.reset(token)
        scope.close()
