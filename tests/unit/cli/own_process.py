"""Commands in the tests' own process, whose environment and logging are as before afterwards."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from medialane.cli import main
from medialane.observability import ACCESS_LOGGER


def run_command(*words: str) -> int:
    """Return the exit status of `medialane`, which may end before it serves."""
    with unchanged_process():
        return main(list(words))


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Restore what a command changes of its process before it serves."""
    environ, root = dict(os.environ), logging.getLogger()
    handlers, loggers = root.handlers[:], [root, *map(logging.getLogger, ("medialane", ACCESS_LOGGER))]
    levels = [logger.level for logger in loggers]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        root.handlers[:] = handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
