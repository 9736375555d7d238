"""Maps vLLM's exceptions to MedialaneError in the worker. Client messages are kept; tracebacks are only logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.exceptions import (
    GracefulHTTPError,
    VLLMClientError,
    VLLMServerError,
    VLLMUnprocessableEntityError,
    VLLMValidationError,
)
from vllm.v1.engine.exceptions import EngineDeadError

from medialane.core.errors import GenerationFailed, PromptRejected, Unavailable, WorkerLost
from medialane.vllm_bridge.error_text import public_text

logger = logging.getLogger(__name__)

#: Raised by vLLM's front end, before anything of the request has reached EngineCore.
REFUSED = (VLLMClientError, GracefulHTTPError)


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Convert vLLM's exceptions to PromptRejected, Unavailable, WorkerLost or GenerationFailed."""
    try:
        yield
    except VLLMClientError as error:
        param = error.parameter if isinstance(error, VLLMValidationError | VLLMUnprocessableEntityError) else None
        raise PromptRejected(public_text(error), param=param) from error
    except GracefulHTTPError as error:
        raise Unavailable(error.message) from error
    except EngineDeadError as error:
        raise WorkerLost("the worker's engine has died") from error
    except VLLMServerError as error:
        logger.exception("the engine failed a request")
        raise GenerationFailed("the engine failed this request") from error
