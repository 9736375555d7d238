"""Limits of the kernel that tests run into, as a busy server does. They apply to the whole process of the tests."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_free_descriptors() -> Iterator[None]:
    """No file can be opened, and no socket."""
    descriptor = os.open("/", os.O_PATH)
    os.close(descriptor)
    with _limit(resource.RLIMIT_NOFILE, descriptor):  # the lowest that is free
        yield


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """No file can become larger."""
    with _limit(resource.RLIMIT_FSIZE, num_bytes):
        yield


@contextmanager
def _limit(what: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))
