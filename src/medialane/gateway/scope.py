"""One scope per HTTP request: everything that the request takes is taken through it and ends with it.

vLLM's app drives a request, so our steps run inside two of its calls. The scope is what ties them together: the
outermost middleware opens it, a context variable carries it, and it closes exactly once, when the response has ended,
failed or lost its client.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Protocol

from medialane.arena import Lease
from medialane.core.errors import InvalidMediaUrl, MedialaneError
from medialane.core.feature import Feature
from medialane.core.media import MediaRef
from medialane.observability.timeline import StageTimeline

#: What intake puts in place of a media URL: the scheme, then the reference's number in the scope.
REFERENCE_SCHEME = "medialane:"


class Releasable(Protocol):
    def release(self) -> None: ...


class RequestScope:
    """What one request holds. Resources are released in the reverse order of taking.

    `features` are the leases that it took on features, by mm_hash; they are among the resources. `error_code` tells
    which error the request was answered with, if any.
    """

    def __init__(self) -> None:
        self.timeline = StageTimeline()
        self.refs: tuple[MediaRef, ...] = ()
        self.features: dict[str, Lease[Feature]] = {}
        self.error_code: str | None = None
        self._stack = ExitStack()
        self._closed = False

    def take(self, resource: Releasable) -> None:
        """Own `resource` until the scope closes. A resource that comes too late is released at once."""
        if self._closed:
            resource.release()
        else:
            self._stack.callback(resource.release)

    def resolve(self, url: str) -> MediaRef:
        """The media reference that intake left as `url` in the body. Raises InvalidMediaUrl."""
        number = url.removeprefix(REFERENCE_SCHEME)
        if not url.startswith(REFERENCE_SCHEME) or not number.isdecimal() or int(number) >= len(self.refs):
            raise InvalidMediaUrl("the media URL did not come through the gateway's intake")
        return self.refs[int(number)]

    def fail(self, error: MedialaneError) -> None:
        """Remember that the request is answered with `error`. The first one counts: others follow from it."""
        self.error_code = self.error_code or error.code

    def close(self) -> None:
        """Release everything. Idempotent. Media that came inside the request are let go of: whatever still runs in
        the request's context keeps the scope itself."""
        if not self._closed:
            self._closed = True
            self.refs = ()
            self.features = {}
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
