"""Maps vLLM's exceptions to MedialaneError in the worker. Client messages are kept; tracebacks are only logged.

vLLM's own messages for clients are short sentences. Others include the data being processed (`Failed to apply ... on
data={'audio': [array([...` is 640 characters of samples), or addresses and paths: `public_text` cuts those off.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.exceptions import (
    GracefulHTTPError,
    MaxQueuedTokensError,
    QueueOverflowError,
    VLLMClientError,
    VLLMServerError,
    VLLMUnprocessableEntityError,
    VLLMValidationError,
)
from vllm.v1.engine.exceptions import EngineDeadError

from medialane.types.errors import (
    GenerationFailed,
    PromptRejected,
    Unavailable,
    WorkerBusy,
    WorkerLost,
    is_exhausted,
    own_fault,
)

logger = logging.getLogger(__name__)

#: What neither a media item nor a request's options cause.
_OWN = (VLLMServerError, GracefulHTTPError, torch.OutOfMemoryError, torch.AcceleratorError)

#: In the message of the RuntimeError that torch raises when the host's memory has run out.
_CPU_ALLOCATOR = "DefaultCPUAllocator"

#: Raised by vLLM's front end, before anything of the request has reached EngineCore.
REQUEST_ERRORS = (VLLMClientError, GracefulHTTPError)


#: vLLM's longest message for clients has about 500 characters.
MAX_CHARS = 1000

_FLOAT = r"(?: -? \d+ \. \d* (?: e [-+]? \d+ )? | -? nan | -? inf )"
_INTEGER = r"-? \d+"

#: Start of dumped data: `data=`, the `repr` of an array, of a tensor or with an address, and nested or long lists of
#: numbers. Shapes and ranges of values do not match.
_CONTENTS = re.compile(
    rf"""
    \b data=
    | \b (?: array | tensor | ndarray | Tensor ) \(
    | < [\w.]++ [^<>]* \b (?: at \s 0x | size= | mode= )
    | \[ \s{{0,8}} \[ [\s\[]{{0,16}} (?: {_FLOAT} | {_INTEGER} )
    | [\[(] \s* {_FLOAT} (?: [\s,]+ {_FLOAT} ){{2}}
    | [\[(] \s* {_INTEGER} (?: [\s,]+ {_INTEGER} ){{7}}
    """,
    re.VERBOSE,
)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")


def engine_fault(error: BaseException) -> BaseException | None:
    """Return the exception, `error` or one of its causes, for which no request is to blame; None if there is none. vLLM
    wraps whatever a Hugging Face processor raises in a ValueError."""
    fault = own_fault(error, *_OWN)
    if fault is None and any(_CPU_ALLOCATOR in str(one) for one in (error, error.__cause__) if one is not None):
        return MemoryError(str(error))
    return fault


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Convert vLLM's exceptions, and exceptions of a process that has run out of memory, to PromptRejected, WorkerBusy,
    Unavailable, WorkerLost or GenerationFailed."""
    try:
        yield
    except VLLMClientError as error:
        param = error.parameter if isinstance(error, VLLMValidationError | VLLMUnprocessableEntityError) else None
        raise PromptRejected(public_text(error), param=param) from error
    except (QueueOverflowError, MaxQueuedTokensError) as error:
        raise WorkerBusy(error.message) from error
    except GracefulHTTPError as error:
        raise Unavailable(error.message) from error
    except EngineDeadError as error:
        raise WorkerLost("the worker's engine has died") from error
    except (MemoryError, OSError, RuntimeError) as error:
        if is_exhausted(error) or isinstance(error, torch.OutOfMemoryError):
            logger.exception("a request was refused")
            raise Unavailable("the worker is out of memory, files or threads") from error
        raise
    except VLLMServerError as error:
        logger.exception("the engine failed a request")
        raise GenerationFailed("the engine failed this request") from error


def public_text(error: BaseException) -> str:
    """Return the message of `error` up to the first content that a client must not see, at most MAX_CHARS of it."""
    text = str(error)[: 2 * MAX_CHARS]
    contents = _CONTENTS.search(text)
    whole = contents is None and len(text) <= MAX_CHARS
    if contents is not None:
        text = text[: contents.start()]
    text = _ADDRESS.sub("...", text)[:MAX_CHARS].rstrip()
    return text if whole else f"{text} ..."
