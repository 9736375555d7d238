"""Exception hierarchy, whether a failure to read a media item is ours or the item's, and when a client that is refused
with 503 is to try again (`Retry-After`).

Every class defines its HTTP status, its stable `code` and OpenAI's error type (`kind`), or inherits them. Messages are
written for clients: no third-party error text, no addresses, no local paths.

Decoders and processors raise anything for damaged files, so an exception by itself says that the file is at fault. Some
say that this process or its installation is: memory, file descriptors or threads have run out, a module or library is
missing, or an exception of the caller's own kinds (a dead engine). Libraries wrap exceptions, so their causes are
looked at, too (`own_fault`). A client gets an error of the 5xx range for these.
"""

from __future__ import annotations

import errno
import inspect
import logging
import math
import time
from collections.abc import Callable, Hashable
from concurrent.futures import BrokenExecutor
from types import TracebackType
from typing import ClassVar, Final

import msgspec

logger = logging.getLogger(__name__)

_CLASSES: dict[str, type[MedialaneError]] = {}


class MedialaneError(Exception):
    """Base class.

    `param` is the invalid field of the request in OpenAI's notation (`messages[0].content[2].image_url`),
    `retry_after_s` the value of the Retry-After header. Other processes rebuild errors of any class (`from_report`), so
    the constructors of all classes have these parameters and no others; otherwise their definition raises TypeError.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"

    def __init_subclass__(cls, *, code: str, status: int | None = None, kind: str | None = None) -> None:
        super().__init_subclass__()
        cls.code = code
        cls.status = status or cls.status
        cls.kind = kind or cls.kind
        if list(inspect.signature(cls).parameters) != ["message", "param", "retry_after_s"]:
            raise TypeError(f"{cls.__name__} cannot be rebuilt by another process: its constructor differs")
        _CLASSES[code] = cls

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def at(self, param: str) -> MedialaneError:
        """Return the same error with the field of the request that it refers to."""
        return type(self)(self.message, param=param, retry_after_s=self.retry_after_s)


# fmt: off
class InvalidRequest(MedialaneError, code="invalid_request", status=400, kind="invalid_request_error"):
    """The client must change the request."""

class InvalidBody(InvalidRequest, code="invalid_body"): ...  # not JSON, or not of the expected schema
class ModelRequired(InvalidRequest, code="model_required"): ...  # it names none of several models

class InvalidMediaUrl(InvalidRequest, code="invalid_media_url"): ...
class UnsupportedUrlScheme(InvalidRequest, code="unsupported_url_scheme"): ...
class MediaUrlForbidden(InvalidRequest, code="media_url_forbidden"): ...
class InvalidDataUrl(InvalidRequest, code="invalid_data_url"): ...
class InvalidBase64(InvalidRequest, code="invalid_base64"): ...
class TooManyRedirects(InvalidRequest, code="too_many_redirects", status=422): ...
class MediaFetchFailed(InvalidRequest, code="media_fetch_failed", status=422): ...  # the media's origin refuses them

class EmptyMedia(InvalidRequest, code="empty_media"): ...
class InvalidImage(InvalidRequest, code="invalid_image"): ...
class InvalidVideo(InvalidRequest, code="invalid_video"): ...
class InvalidAudio(InvalidRequest, code="invalid_audio"): ...
class InvalidDocument(InvalidRequest, code="invalid_document"): ...  # damaged, encrypted, or without pages
class InvalidEmbeds(InvalidRequest, code="invalid_embeds"): ...
class ImageTooComplex(InvalidRequest, code="image_too_complex"): ...
class TooManyFrames(InvalidRequest, code="too_many_frames"): ...
class TooManyPages(InvalidRequest, code="too_many_pages"): ...
class TooManyMediaItems(InvalidRequest, code="too_many_media_items"): ...
class UnknownMediaUuid(InvalidRequest, code="unknown_media_uuid"): ...
class UnknownMedia(InvalidRequest, code="unknown_media", status=404): ...  # or another client's
class NotFound(InvalidRequest, code="not_found", status=404): ...  # of what operators see: nothing has this name
class UuidConflict(InvalidRequest, code="uuid_conflict", status=409): ...  # the uuid names other content
class InvalidGrammar(InvalidRequest, code="invalid_grammar"): ...  # the engine cannot compile or follow it
class InvalidUpload(InvalidRequest, code="invalid_upload"): ...  # vLLM's status for every file that it does not accept

class PromptRejected(InvalidRequest, code="invalid_prompt"): ...  # vLLM rejected the prompt or its parameters
class PromptTooLong(PromptRejected, code="prompt_too_long"): ...  # items alone exceed the maximum model length

class InvalidFeature(InvalidRequest, code="invalid_feature"):
    """A feature is inconsistent in itself, or with its placeholder, the prompt or the model; it must never reach an
    engine.

    A client can change the processor options of its media: there is no fallback to another stage, which would apply
    the same options. Without options, the worker is to process the media itself.
    """

class TooLarge(InvalidRequest, code="too_large", status=413): ...
class BodyTooLarge(TooLarge, code="body_too_large"): ...
class MediaTooLarge(TooLarge, code="media_too_large"): ...
class ImageTooLarge(TooLarge, code="image_too_large"): ...
class VideoTooLarge(TooLarge, code="video_too_large"): ...
class VideoTooLong(TooLarge, code="video_too_long"): ...
class AudioTooLong(TooLarge, code="audio_too_long"): ...

class TargetTooLong(InvalidRequest, code="target_too_long", status=414): ...  # path and query of a request
class HeaderTooLarge(InvalidRequest, code="header_too_large", status=431): ...
class ClientTooSlow(InvalidRequest, code="request_timeout", status=408): ...  # in sending a header or a body
class UnsupportedMediaType(InvalidRequest, code="unsupported_media_type", status=415): ...

class PermissionDenied(MedialaneError, code="permission_denied", status=403, kind="permission_error"): ...

class MediaLeasesFull(MedialaneError, code="media_leases_full", status=507): ...  # --media-lease-share

class LimitExceeded(MedialaneError, code="limit_exceeded", status=429, kind="rate_limit_error"):
    """A limit of the client's own key (`--keys`), whatever the load of the server."""

class RateLimitExceeded(LimitExceeded, code="rate_limit_exceeded"): ...
class ConcurrencyLimitExceeded(LimitExceeded, code="concurrency_limit_exceeded"): ...

class UpstreamFailed(MedialaneError, code="media_upstream_error", status=502):
    """The media's origin cannot be reached, or its response is an error of its own, or not valid."""

class MediaFetchTimeout(MedialaneError, code="media_fetch_timeout", status=504): ...

class Unavailable(MedialaneError, code="unavailable", status=503):
    """The same request may succeed later."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = 1) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)

class QueueFull(Unavailable, code="queue_full"): ...  # as many requests wait for admission as may
class TtftLimitExceeded(Unavailable, code="ttft_limit_exceeded"): ...  # its first token would come too late
class QueueTimeout(Unavailable, code="queue_timeout"): ...  # not admitted within --gateway-queue-timeout

class ArenaFull(Unavailable, code="arena_full"): ...
class MediaOverloaded(Unavailable, code="media_overloaded"): ...
class BodyMemoryExhausted(Unavailable, code="body_memory_exhausted"): ...
class TooManyConnections(Unavailable, code="too_many_connections"): ...
class StoreUnavailable(Unavailable, code="media_store_unavailable"): ...  # not connected, or lost during a call
class NoWorkerReady(Unavailable, code="no_worker_ready"): ...
class ModelUnavailable(Unavailable, code="model_unavailable"): ...  # its gateways do not answer
class WorkerLost(Unavailable, code="worker_lost"): ...
class GatewayDraining(Unavailable, code="gateway_draining"): ...  # the answer has not ended within --drain-timeout
class WorkerBusy(Unavailable, code="worker_busy"): ...  # its engine's queue is full: another worker may have room
class AdapterChanged(Unavailable, code="adapter_changed"): ...  # its files, since it was loaded: load it again
class AlreadyJoined(Unavailable, code="already_joined"): ...  # a worker that is connected through another address

class AdminCallIncomplete(Unavailable, code="admin_call_incomplete"):
    """Not all workers have completed an administrative call. For operators: the message contains workers' addresses."""

class PreparationFailed(MedialaneError, code="media_preparation_failed"): ...
class PreparerCrashed(PreparationFailed, code="media_decoder_crashed"): ...
class PreparerTimeout(PreparationFailed, code="media_decoder_timeout"): ...

class FeatureUnsupported(PreparationFailed, code="feature_unsupported"):
    """An item or its prompt cannot be processed separately from the engine. Another stage may succeed."""

class GenerationFailed(MedialaneError, code="generation_failed"): ...  # the engine failed this request

class RequestEndsWorkers(InvalidRequest, code="request_ends_workers", status=422):
    """Workers were lost right after this request had arrived, one after the other: it is sent to no further one."""

# Internal, not sent to clients

class WorkerStalled(WorkerLost, code="worker_stalled"): ...  # its engine hangs
class WorkerDraining(WorkerLost, code="worker_draining"): ...  # it stops as planned, and takes no new requests
class ClientDisconnected(InvalidRequest, code="client_disconnected", status=408): ...  # no one reads the response

class HandoverFailed(MedialaneError, code="handover_failed"):
    """One stage or transport of the hand-over failed; the next one may succeed."""

class MediaLost(HandoverFailed, code="media_lost"): ...  # with the store in whose arena they were

class TransferFailed(HandoverFailed, code="transfer_failed"):
    """An entry could not be copied from another host's store. Another mover or hand-over path may succeed."""

class TransferTimeout(TransferFailed, code="transfer_timeout"): ...  # a mover was given up

class ProtocolViolation(MedialaneError, code="protocol_violation"):
    """The peer violated the protocol; the connection is closed."""

class AuthenticationFailed(MedialaneError, code="authentication_failed"):
    """A peer did not prove that it has the shared secret, or the certificate. The message is never sent to it."""

class StartupFailed(MedialaneError, code="startup_failed"):
    """An error at start-up that the operator must fix; the message says how."""
# fmt: on


class ErrorReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A MedialaneError as sent to another process."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None


def to_report(error: MedialaneError) -> ErrorReport:
    """Serialize `error` for another process."""
    return ErrorReport(error.code, error.message, error.param, error.retry_after_s)


def report_of(error: Exception, what: str) -> ErrorReport:
    """Serialize what a worker raised in `what`; an unexpected error is logged, and its text stays in this process."""
    if isinstance(error, MedialaneError):
        return to_report(error)
    logger.error("%s failed: %r", what, error, exc_info=error)
    return to_report(GenerationFailed(f"the worker failed this {what}"))


def from_report(report: ErrorReport) -> MedialaneError:
    """Rebuild the error of a report. An unknown code gives a plain MedialaneError."""
    cls = _CLASSES.get(report.code, MedialaneError)
    return cls(report.message, param=report.param, retry_after_s=report.retry_after_s)


def prompt_too_long(least: int, most: int) -> PromptTooLong:
    """Return the error, with vLLM's message, for a prompt with at least that many tokens, more than the model
    accepts."""
    return PromptTooLong(
        f"The decoder prompt (length at least {least}) is longer than the maximum model length of {most}. Make sure "
        "that `max_model_len` is no smaller than the number of text tokens plus multimodal tokens. For image inputs, "
        "the number of image tokens depends on the number of images, and possibly their aspect ratios as well."
    )


#: `errno` of a process or host that has used up something.
_EXHAUSTED = frozenset((errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT))

#: A name or module that does not exist is not a matter of content. (UnboundLocalError is: a parser has skipped a part.)
_OURS = (MemoryError, ImportError, NameError, BrokenExecutor)

_NO_THREAD = "can't start new thread"


def own_fault(error: BaseException, *more: type[BaseException]) -> BaseException | None:
    """Return the exception, `error` or one of its causes, that is this process's fault; None if there is none.

    `more` are further classes of such exceptions.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if _is_own(current) or isinstance(current, more):
            return current
        seen.add(id(current))
        current = current.__cause__
    return None


def is_exhausted(error: BaseException) -> bool:
    """Return whether memory, file descriptors, disk space or threads have run out: later, there may be more."""
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        return True
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and str(error) == _NO_THREAD)


def raise_exhausted(error: BaseException) -> None:
    """Raise Unavailable if `error` says that memory, file descriptors, disk space or threads have run out."""
    if is_exhausted(error):
        raise Unavailable("the server is out of memory, files or threads") from error


def raised_in(error: BaseException, package: str) -> bool:
    """Return whether a Python function of `package` has raised `error`, not one that it has called."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return name == package or name.startswith(f"{package}.")


def _is_own(error: BaseException) -> bool:
    if isinstance(error, UnboundLocalError):
        return False
    return isinstance(error, _OURS) or is_exhausted(error) or _failed_to_load(error)


def _failed_to_load(error: BaseException) -> bool:
    """Return whether a shared library is missing: ctypes raises OSError, as may a module while it is imported."""
    trace = error.__traceback__ if isinstance(error, OSError) else None
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_globals.get("__name__") == "ctypes" or frame.f_code.co_name == "<module>":
            return True
        trace = trace.tb_next
    return False


# When to try again

MAX_RETRY_AFTER_S: Final = 120

#: Weight of the newest in the moving mean of how long a permit is held: about the last twenty count.
_NEWEST: Final = 0.1


def retry_after(seconds: float) -> int:
    """Return `seconds` in whole ones, at least 1 and at most two minutes."""
    return max(1, math.ceil(min(seconds, MAX_RETRY_AFTER_S)))


class Outage:
    """The times in which something is missing, beginning with now. An outage is expected to be as long as the last one;
    one that is longer, to last again as long as it has exceeded that."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = clock()
        self._last_s = 0.0

    def begin(self) -> None:
        """Idempotent."""
        if self._since is None:
            self._since = self._clock()

    def end(self) -> None:
        """Idempotent."""
        if self._since is not None:
            self._last_s, self._since = self._clock() - self._since, None

    @property
    def left_s(self) -> float:
        """The expected rest of the outage; 0 if there is none."""
        return 0.0 if self._since is None else abs(self._last_s - (self._clock() - self._since))

    @property
    def retry_after_s(self) -> int:
        return retry_after(self.left_s)


class Permits:
    """A limited number of permits: who has one, for how long, and so when the next ones become free."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken: dict[Hashable, float] = {}
        self._mean_s: float | None = None
        self._promised = float("-inf")

    def take(self, key: Hashable) -> None:
        """Note that `key` has a permit. Idempotent."""
        self._taken.setdefault(key, self._clock())

    def free(self, key: Hashable) -> None:
        """Note that `key` has no permit any more. Idempotent."""
        if (since := self._taken.pop(key, None)) is not None:
            taken_s = self._clock() - since
            self._mean_s = taken_s if self._mean_s is None else self._mean_s + _NEWEST * (taken_s - self._mean_s)

    def withdraw(self, key: Hashable) -> None:
        """Note that `key` was refused after all: how long it had its permit says nothing about others. Idempotent."""
        self._taken.pop(key, None)

    @property
    def retry_after_s(self) -> int:
        """When the next permit is expected to become free."""
        return retry_after(self._interval_s(self._clock()))

    def promise(self) -> int:
        """Return the Retry-After of one who is refused: each is promised the next permit that is expected to become
        free, so that they come back one after the other."""
        now = self._clock()
        next_free = max(now, self._promised) + self._interval_s(now)
        self._promised = min(next_free, now + MAX_RETRY_AFTER_S)
        return retry_after(self._promised - now)

    def _interval_s(self, now: float) -> float:
        """Return the expected time from one permit that becomes free to the next."""
        if not self._taken:
            return 0.0
        oldest_s = now - next(iter(self._taken.values()))
        return (oldest_s if self._mean_s is None else self._mean_s) / len(self._taken)
