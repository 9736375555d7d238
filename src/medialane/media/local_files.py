"""Reads files below one folder, safe against concurrently changed symbolic links.

The folder is opened, and paths are resolved beneath its descriptor in one system call (`openat2` with RESOLVE_BENEATH,
Linux 5.6), so there is no race between check and open (TOCTOU). If that call does not exist or is filtered, the path is
opened component by component, and symbolic links are not followed at all.

Disks block, so files are opened, read and hashed in threads, in chunks, and written to the same bodies as HTTP fetches.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import stat
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

from blake3 import blake3

from medialane.media.config import FetchLimits
from medialane.media.http_source import Body
from medialane.runtime.linux import last_error, libc
from medialane.types.errors import (
    EmptyMedia,
    InvalidMediaUrl,
    MediaFetchFailed,
    MediaFetchTimeout,
    MediaTooLarge,
    MediaUrlForbidden,
    raise_exhausted,
)

_SYS_OPENAT2 = 437  # the same on every architecture: /usr/include/asm-generic/unistd.h
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_BENEATH = 0x08
#: O_NONBLOCK: opening a pipe must not wait for its writer.
_FILE_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY

#: Chunk size; a chunk is copied to the body on the event loop, in about 0.1 ms.
_CHUNK_BYTES = 1 << 20

_REFUSED = "the file URL is not in a folder that the server permits (--allowed-local-media-path)"


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class LocalFiles:
    """Reads regular files below `root`; without a root it rejects everything."""

    def __init__(self, root: str | None) -> None:
        self._roots = () if root is None else tuple({os.path.abspath(root), os.path.realpath(root)})
        # Two threads, so that one slow read does not block the others.
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="media-file")

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def read(self, url: str, limits: FetchLimits, *, open_body: Callable[[], Body]) -> str:
        """Read a file: URL into a body. Returns the content's hash. A cancelled read ends after the current chunk.

        Raises InvalidMediaUrl, MediaUrlForbidden, MediaFetchFailed (no such file), MediaFetchTimeout, MediaTooLarge,
        EmptyMedia, and what the body raises.
        """
        root, path = self._split(url)
        try:
            async with asyncio.timeout(limits.timeout_s):
                return await self._read(root, path, limits, open_body)
        except TimeoutError as error:
            raise MediaFetchTimeout("the media file could not be read in time") from error

    async def _read(self, root: str, path: str, limits: FetchLimits, open_body: Callable[[], Body]) -> str:
        opening = self._executor.submit(open_beneath, root, path)
        last: Future[Any] = opening
        body = open_body()
        try:
            file = await asyncio.wrap_future(opening)
            _check_size(file.num_bytes, limits)
            body.expect(file.num_bytes)
            num_bytes = 0
            while True:
                last = self._executor.submit(file.read)
                if not (chunk := await asyncio.wrap_future(last)):
                    break
                num_bytes += len(chunk)
                _check_size(num_bytes, limits)
                body.write(chunk)
            if not num_bytes:
                raise EmptyMedia("the media is empty")
            body.finish(file.content_hash)
            return file.content_hash
        except BaseException:  # cancelled or failed: release the body's memory
            body.abandon()
            raise
        finally:
            # Only after the last read in a thread: otherwise, it could read a file that reuses the descriptor.
            last.add_done_callback(lambda _: _close(opening))

    def _split(self, url: str) -> tuple[str, str]:
        """Split a URL's path into root and relative path. Raises MediaUrlForbidden, InvalidMediaUrl."""
        host, _, path = url.partition("://")[2].partition("/")
        if host.lower() not in ("", "localhost") or not path:
            raise InvalidMediaUrl("file URLs must have the form file:///path")
        path = "/" + unquote(path.partition("?")[0].partition("#")[0])
        if "\0" in path:
            raise InvalidMediaUrl("the file URL has a control character")
        for root in self._roots:
            if path.startswith(root.rstrip("/") + "/"):
                return root, path[len(root) :].lstrip("/") or "."
        raise MediaUrlForbidden(_REFUSED)


class OpenFile:
    """A regular file, read and hashed sequentially, by one thread at a time."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """`num_bytes` is the file's size when it was opened."""
        self.num_bytes = num_bytes
        self._descriptor = descriptor
        self._hasher = blake3()

    def read(self) -> bytes:
        """Return the next chunk; empty at the end."""
        chunk = os.read(self._descriptor, _CHUNK_BYTES)
        self._hasher.update(chunk)
        return chunk

    @property
    def content_hash(self) -> str:
        """The hash of what has been read."""
        return self._hasher.hexdigest()

    def close(self) -> None:
        os.close(self._descriptor)


def open_beneath(root: str, path: str) -> OpenFile:
    """Open the regular file `path` beneath `root`. Raises MediaUrlForbidden, MediaFetchFailed."""
    try:
        folder = os.open(root, _FOLDER_FLAGS)
        try:
            opened = _open_beneath(folder, path)
        finally:
            os.close(folder)
    except OSError as error:
        raise_exhausted(error)
        if error.errno in (errno.ENOENT, errno.EAGAIN):
            raise MediaFetchFailed("the media file does not exist") from error
        raise MediaUrlForbidden(_REFUSED) from error
    status = os.fstat(opened)
    if not stat.S_ISREG(status.st_mode):
        os.close(opened)
        raise MediaUrlForbidden(_REFUSED)
    return OpenFile(opened, status.st_size)


def _close(opening: Future[OpenFile]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _check_size(num_bytes: int, limits: FetchLimits) -> None:
    if num_bytes > limits.max_bytes:
        raise MediaTooLarge(f"the media has more than {limits.max_bytes} bytes")


def _open_beneath(folder: int, path: str) -> int:
    how = _OpenHow(_FILE_FLAGS, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    opened: int = libc.syscall(_SYS_OPENAT2, folder, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    if opened >= 0:
        return opened
    error = last_error("openat2")
    if error.errno in (errno.ENOSYS, errno.EPERM):
        return _walk(folder, path)
    raise error


def _walk(folder: int, path: str) -> int:
    *folders, name = [part for part in path.split("/") if part not in ("", ".")] or ["."]
    if ".." in (*folders, name):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    at = os.dup(folder)
    try:
        for part in folders:
            below = os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        return os.open(name, _FILE_FLAGS | os.O_NOFOLLOW, dir_fd=at)
    finally:
        os.close(at)
