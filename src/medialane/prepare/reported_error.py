"""Errors that preparers report. A preparer may have been taken over by a hostile file, and its report becomes the
answer to a client: it may choose among the errors that decoding and processing raise, and its text is short and plain.
"""

from __future__ import annotations

import logging
import re

from medialane.types import errors
from medialane.types.errors import ErrorReport, MedialaneError, PreparationFailed

logger = logging.getLogger(__name__)

#: What decoding (`media`) and processing (`Processor`) raise.
_REPORTABLE = {
    cls.code: cls
    for cls in (
        errors.AudioTooLong,
        errors.EmptyMedia,
        errors.FeatureUnsupported,
        errors.ImageTooComplex,
        errors.ImageTooLarge,
        errors.InvalidAudio,
        errors.InvalidBase64,  # in a list of JPEG frames
        errors.InvalidEmbeds,
        errors.InvalidFeature,
        errors.InvalidImage,
        errors.InvalidRequest,
        errors.InvalidVideo,
        errors.MediaTooLarge,
        errors.PreparationFailed,
        errors.PromptRejected,
        errors.TooManyFrames,
        errors.Unavailable,
        errors.UnsupportedMediaType,
        errors.VideoTooLarge,
        errors.VideoTooLong,
    )
}

#: The longest of our own messages has 200 characters, vLLM's are cut at 1000.
MAX_TEXT = 500

#: An absolute path, or a file URL; not the second part of `image/png` or of another URL.
_PATH = re.compile(r"(?:file:/*|(?<![\w/:]))/[\w.~][^\s'\",;)]*")


def reported_error(report: ErrorReport) -> MedialaneError:
    """Return the error that a preparer has reported, without its field, which the store knows."""
    cls = _REPORTABLE.get(report.code)
    if cls is None:
        logger.warning("a preparer has reported an error that preparers do not raise: %s", _plain(report.code))
        return PreparationFailed("preparing this item failed")
    return cls(_plain(report.message) or "preparing this item failed")


def _plain(text: str) -> str:
    """Return one line of printable characters without local paths, at most MAX_TEXT of them."""
    start = text[: 2 * MAX_TEXT]
    line = "".join(character if character.isprintable() else " " for character in start).strip()
    line = _PATH.sub("...", line)
    is_whole = len(line) <= MAX_TEXT and len(text) <= 2 * MAX_TEXT
    return line if is_whole else f"{line[: MAX_TEXT - 4]} ..."
