"""What the log of a process shows of the records of a test."""

import logging
from collections.abc import Iterable

from medialane.observability.logging import RepetitionLimit


def written_lines(records: Iterable[logging.LogRecord]) -> str:
    limit = RepetitionLimit()
    return "\n".join(each.getMessage() for record in records for each in limit.admit(record, record.created))
