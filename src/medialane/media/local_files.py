"""Files below one folder, and nothing else, whatever symbolic links do in the meantime.

The folder is opened, and everything is resolved beneath its descriptor in one system call (`openat2` with
RESOLVE_BENEATH, Linux 5.6), so there is no moment between a check and an open. Where that call does not exist or is
filtered, the path is walked component by component and no symbolic link is followed at all.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

from medialane.core.errors import (
    EmptyMedia,
    InvalidMediaUrl,
    MediaFetchFailed,
    MediaFetchTimeout,
    MediaTooLarge,
    MediaUrlForbidden,
)
from medialane.core.hashing import content_hash
from medialane.media.config import FetchLimits

_SYS_OPENAT2 = 437  # the same on every architecture: /usr/include/asm-generic/unistd.h
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_BENEATH = 0x08
#: O_NONBLOCK: opening a pipe must not wait for its writer.
_FILE_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY

_REFUSED = "the file URL does not name a file that this gateway may read"


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)


class LocalFiles:
    """Reads regular files below `root`; without a root it refuses everything."""

    def __init__(self, root: str | None) -> None:
        self._roots = () if root is None else tuple({os.path.abspath(root), os.path.realpath(root)})
        # Disks block: two threads, so that one slow read does not hold up the rest.
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="media-file")

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def read(self, url: str, limits: FetchLimits) -> bytes:
        """The bytes of a file: URL. A cancelled read ends in its thread.

        Raises InvalidMediaUrl, MediaUrlForbidden, MediaFetchFailed (no such file), MediaFetchTimeout, MediaTooLarge,
        EmptyMedia.
        """
        root, path = self._split(url)
        try:
            async with asyncio.timeout(limits.timeout_s):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._executor, read_beneath, root, path, limits.max_bytes)
        except TimeoutError as error:
            raise MediaFetchTimeout("the media file could not be read in time") from error

    async def hash(self, data: bytes) -> str:
        """The content hash, made in a thread: a video's takes several times what the loop may be kept for."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, content_hash, data)

    def _split(self, url: str) -> tuple[str, str]:
        """The root and what follows it. Raises MediaUrlForbidden, InvalidMediaUrl."""
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


def read_beneath(root: str, path: str, max_bytes: int) -> bytes:
    """Read the regular file `path` beneath `root`. Raises as `LocalFiles.read` does."""
    try:
        folder = os.open(root, _FOLDER_FLAGS)
        try:
            opened = _open_beneath(folder, path)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EAGAIN):
            raise MediaFetchFailed("the media file does not exist") from error
        raise MediaUrlForbidden(_REFUSED) from error
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise MediaUrlForbidden(_REFUSED)
        with open(opened, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(opened)
    if len(data) > max_bytes:
        raise MediaTooLarge(f"the media has more than {max_bytes} bytes")
    if not data:
        raise EmptyMedia("the media is empty")
    return data


def _open_beneath(folder: int, path: str) -> int:
    how = _OpenHow(_FILE_FLAGS, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    opened: int = _libc.syscall(_SYS_OPENAT2, folder, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    if opened >= 0:
        return opened
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EPERM):
        return _walk(folder, path)
    raise OSError(number, os.strerror(number))


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
