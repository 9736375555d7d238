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

import msgspec

from medialane.arena import Lease
from medialane.core.errors import ErrorReport, InvalidBody, InvalidMediaUrl, MedialaneError, to_report
from medialane.core.feature import Feature
from medialane.core.media import MediaRef, MediaSize
from medialane.core.request import RoutingDecision
from medialane.gateway.report import Cache, MediaReport, RequestReport, routing_report, timestamps
from medialane.gateway.source_entry import SourceEntry, SourceStage
from medialane.observability.timeline import StageTimeline

#: What intake puts in place of a media URL: the scheme, then the reference's number in the scope.
REFERENCE_SCHEME = "medialane:"


class Releasable(Protocol):
    def release(self) -> None: ...


class RequestScope:
    """What one request holds. Resources are released in the reverse order of taking.

    `refs` are the media that intake lifted from the body, `unread` is why it could not look for any.
    `features` are the leases that it took on features, by mm_hash, `entries` what it has found for stages `decoded` and
    `url`, by stage and number of the item; they are among the resources. `failure` is the error that the request is
    answered with, if any: a report of it, since an exception would keep what its frames hold; with `app_answers`,
    vLLM's app words the answer. `items` are what the answer's report tells of the media, noted only if `wants_report`.
    """

    def __init__(self) -> None:
        self.timeline = StageTimeline()
        self.refs: tuple[MediaRef, ...] = ()
        self.unread: str | None = None
        self.features: dict[str, Lease[Feature]] = {}
        self.entries: dict[tuple[SourceStage, int], SourceEntry] = {}
        self.failure: ErrorReport | None = None
        self.app_answers = False
        self.wants_report = False
        self.items: list[MediaReport] = []
        self._way: tuple[str, str | None] | None = None
        self._decision: RoutingDecision | None = None
        self._engine_cached_tokens: int | None = None
        self._stack = ExitStack()
        self._closed = False

    @property
    def error_code(self) -> str | None:
        return None if self.failure is None else self.failure.code

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
        if self.unread is not None:
            raise InvalidBody(f"media cannot be taken from this request's JSON: {self.unread}")
        if not url.startswith(REFERENCE_SCHEME) or not number.isdecimal() or int(number) >= len(self.refs):
            raise InvalidMediaUrl("the media URL did not come through the gateway's intake")
        return self.refs[int(number)]

    def note_item(
        self,
        ref: MediaRef,
        *,
        mm_hash: str,
        cache: Cache = "none",
        size: MediaSize | None = None,
        num_tokens: int = 0,
    ) -> None:
        """Note what was used of one item. `size` and `num_tokens` are not known where a worker prepares it."""
        if not self.wants_report:
            return
        size = size or MediaSize()
        self.items.append(
            MediaReport(
                ref.param,
                ref.modality,
                cache,
                mm_hash,
                width=size.width,
                height=size.height,
                num_frames=size.num_frames,
                num_samples=size.num_samples,
                timestamps=timestamps(size),
                num_tokens=num_tokens,
            )
        )

    def note_way(self, stage: str, transport: str | None) -> None:
        """Note how the media are handed over. The last way counts: it is the one that worked."""
        self._way = stage, transport

    def note_route(self, decision: RoutingDecision) -> None:
        """Note where the request is sent. The last one counts."""
        self._decision = decision

    def note_cached(self, num_tokens: int | None) -> None:
        """Note how many of the prompt's tokens the engine found in its cache."""
        self._engine_cached_tokens = num_tokens

    def report(self) -> bytes:
        """JSON of what was used for the request so far, the items in the order of the request."""
        places = {ref.param: n for n, ref in enumerate(self.refs)}
        stage, transport = self._way if self._way and self.items else (None, None)  # text goes no way of media
        timeline = self.timeline
        return msgspec.json.encode(
            RequestReport(
                tuple(sorted(self.items, key=lambda item: places.get(item.param, len(places)))),
                stage=stage,
                transport=transport,
                routing=None if self._decision is None else routing_report(self._decision, self._engine_cached_tokens),
                times_ms={name: round(seconds * 1000, 2) for name, seconds in timeline.seconds.items()},
                copied_bytes=timeline.copied_bytes,
            )
        )

    def fail(self, error: MedialaneError, *, app_answers: bool = False) -> None:
        """Remember that the request is answered with `error`. The first one counts: others follow from it."""
        if self.failure is None:
            self.failure, self.app_answers = to_report(error), app_answers

    def close(self) -> None:
        """Release everything. Idempotent. Media that came inside the request are let go of: whatever still runs in
        the request's context keeps the scope itself."""
        if not self._closed:
            self._closed = True
            self.refs = ()
            self.features = {}
            self.entries = {}
            self.items = []
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
