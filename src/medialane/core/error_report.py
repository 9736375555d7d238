"""Reports of errors that a process tells another."""

from __future__ import annotations

import logging

from medialane.core.errors import ErrorReport, GenerationFailed, MedialaneError, to_report

logger = logging.getLogger(__name__)


def report_of(error: Exception, what: str) -> ErrorReport:
    """Return the report for the gateway after a worker raised `error` in `what`. Unexpected errors are only logged."""
    if isinstance(error, MedialaneError):
        return to_report(error)
    logger.error("%s failed: %r", what, error, exc_info=error)
    return to_report(GenerationFailed(f"the worker failed this {what}"))
