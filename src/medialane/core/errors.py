"""Exception hierarchy.

    MedialaneError
    |-- InvalidRequest (400)            the client must change the request
    |   |-- InvalidMediaUrl, UnsupportedUrlScheme, MediaUrlForbidden, InvalidDataUrl, InvalidBase64
    |   |-- EmptyMedia, InvalidImage, InvalidVideo, InvalidAudio, InvalidEmbeds, ImageTooComplex, TooManyFrames
    |   |-- TooManyMediaItems, UnknownMediaUuid
    |   |-- TooManyRedirects, MediaFetchFailed, MediaFetchTimeout
    |   |-- PromptRejected              vLLM rejected the prompt or its parameters
    |   |   `-- PromptTooLong             the images alone have more tokens than a prompt may have
    |   |-- InvalidFeature              the worker rejected the request's processed media
    |   |-- InvalidBody                 not JSON, or not of the expected schema
    |   |-- TooLarge (413)              BodyTooLarge, MediaTooLarge, ImageTooLarge, VideoTooLarge, VideoTooLong,
    |   |                               AudioTooLong
    |   |-- HeaderTooLarge (431)
    |   |-- ClientTooSlow (408)         the client took too long to send a header or a body
    |   `-- UnsupportedMediaType (415)
    |-- UpstreamFailed (502)            the media's origin failed
    |-- Unavailable (503, Retry-After)  ArenaFull, PreparersBusy, NoWorkerReady, WorkerLost,
    |   |                               BodyMemoryExhausted, TooManyConnections
    |   `-- AdminCallIncomplete         an administrative call that not all workers have completed
    |-- PreparationFailed (500)         PreparerCrashed, PreparerTimeout
    |-- GenerationFailed (500)          the engine failed this request
    `-- internal, not sent to clients:  HandoverFailed, ProtocolViolation, StartupFailed

Every class defines its HTTP status, its stable `code` and OpenAI's error type (`kind`). Messages are written for
clients: no third-party error text, no addresses, no local paths.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class MedialaneError(Exception):
    """Base class.

    `param` is the invalid field of the request in OpenAI's notation (`messages[0].content[2].image_url`),
    `retry_after_s` the value of the Retry-After header.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def at(self, param: str) -> MedialaneError:
        """Return the same error with the field of the request that it refers to."""
        return type(self)(self.message, param=param, retry_after_s=self.retry_after_s)


class InvalidRequest(MedialaneError):
    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class InvalidBody(InvalidRequest):
    code = "invalid_body"


class InvalidMediaUrl(InvalidRequest):
    code = "invalid_media_url"


class UnsupportedUrlScheme(InvalidRequest):
    code = "unsupported_url_scheme"


class MediaUrlForbidden(InvalidRequest):
    code = "media_url_forbidden"


class InvalidDataUrl(InvalidRequest):
    code = "invalid_data_url"


class InvalidBase64(InvalidRequest):
    code = "invalid_base64"


class EmptyMedia(InvalidRequest):
    code = "empty_media"


class InvalidImage(InvalidRequest):
    code = "invalid_image"


class InvalidVideo(InvalidRequest):
    code = "invalid_video"


class InvalidAudio(InvalidRequest):
    code = "invalid_audio"


class InvalidEmbeds(InvalidRequest):
    code = "invalid_embeds"


class TooManyFrames(InvalidRequest):
    code = "too_many_frames"


class ImageTooComplex(InvalidRequest):
    code = "image_too_complex"


class TooManyMediaItems(InvalidRequest):
    code = "too_many_media_items"


class UnknownMediaUuid(InvalidRequest):
    code = "unknown_media_uuid"


class TooManyRedirects(InvalidRequest):
    code = "too_many_redirects"


class MediaFetchFailed(InvalidRequest):
    code = "media_fetch_failed"


class MediaFetchTimeout(InvalidRequest):
    code = "media_fetch_timeout"


class PromptRejected(InvalidRequest):
    code = "invalid_prompt"


class PromptTooLong(PromptRejected):
    code = "prompt_too_long"


class InvalidFeature(InvalidRequest):
    """A feature is inconsistent in itself, or with its placeholder, the prompt or the model; it must never reach an
    engine.

    A client can change the processor options of its media. There is no fallback to another stage, which would apply
    the same options.
    """

    code = "invalid_feature"


class TooLarge(InvalidRequest):
    status = 413
    code = "too_large"


class BodyTooLarge(TooLarge):
    code = "body_too_large"


class MediaTooLarge(TooLarge):
    code = "media_too_large"


class ImageTooLarge(TooLarge):
    code = "image_too_large"


class VideoTooLarge(TooLarge):
    code = "video_too_large"


class VideoTooLong(TooLarge):
    code = "video_too_long"


class AudioTooLong(TooLarge):
    code = "audio_too_long"


class HeaderTooLarge(InvalidRequest):
    status = 431
    code = "header_too_large"


class ClientTooSlow(InvalidRequest):
    status = 408
    code = "request_timeout"


class UnsupportedMediaType(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


class UpstreamFailed(MedialaneError):
    status = 502
    code = "media_upstream_error"


class Unavailable(MedialaneError):
    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = 1) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)


class ArenaFull(Unavailable):
    code = "arena_full"


class PreparersBusy(Unavailable):
    code = "media_overloaded"


class BodyMemoryExhausted(Unavailable):
    code = "body_memory_exhausted"


class TooManyConnections(Unavailable):
    code = "too_many_connections"


class NoWorkerReady(Unavailable):
    code = "no_worker_ready"


class WorkerLost(Unavailable):
    code = "worker_lost"


class AdminCallIncomplete(Unavailable):
    """For operators: the message contains addresses of workers."""

    code = "admin_call_incomplete"


class PreparationFailed(MedialaneError):
    code = "media_preparation_failed"


class PreparerCrashed(PreparationFailed):
    code = "media_decoder_crashed"


class PreparerTimeout(PreparationFailed):
    code = "media_decoder_timeout"


class GenerationFailed(MedialaneError):
    code = "generation_failed"


class HandoverFailed(MedialaneError):
    """One stage or transport of the hand-over failed; the next one may succeed."""

    code = "handover_failed"


class ProtocolViolation(MedialaneError):
    """The peer violated the protocol; the connection is closed."""

    code = "protocol_violation"


class StartupFailed(MedialaneError):
    """An error at start-up that the operator must fix; the message says how."""

    code = "startup_failed"


class ErrorReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A MedialaneError as sent to another process."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None


def _by_code() -> dict[str, type[MedialaneError]]:
    found: dict[str, type[MedialaneError]] = {}
    todo: list[type[MedialaneError]] = [MedialaneError]
    while todo:
        cls = todo.pop()
        found[cls.code] = cls
        todo.extend(cls.__subclasses__())
    return found


_CLASSES = _by_code()


def to_report(error: MedialaneError) -> ErrorReport:
    """Serialize `error` for another process."""
    return ErrorReport(error.code, error.message, error.param, error.retry_after_s)


def from_report(report: ErrorReport) -> MedialaneError:
    """Rebuild the error of a report. An unknown code gives a plain MedialaneError."""
    cls = _CLASSES.get(report.code, MedialaneError)
    return cls(report.message, param=report.param, retry_after_s=report.retry_after_s)
