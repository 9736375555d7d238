"""The owner's side of an arena file: creation, take-over, prefault, removal.

Creation ensures that a file with a final name has a live owner or can be recognised as abandoned:

    open(.tmp, O_EXCL)  ->  flock EX  ->  still linked?  ->  ftruncate, header  ->  rename to .arena

Between open and flock a process that removes files (`locks.reap`) may find the file without an owner. It locks and
unlinks it, and we see either a locked or an unlinked file: then we retry with another name. Once we hold the lock of a
linked file, no other process can obtain it.

The lock belongs to the open file description, so a forked child that inherits the descriptor would keep the lock of a
dead owner. The descriptor is close-on-exec, which covers subprocesses; a child of os.fork() must call `close`. The
mapping uses a second description, since Python's mmap duplicates the descriptor that it is given.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from threading import Event

from medialane.arena.config import ArenaConfig, not_enough_space
from medialane.arena.index import Index, index_bytes
from medialane.arena.layout import (
    FILE_GLOB,
    FILE_NAME,
    KEEPER_AT,
    NONCE_BYTES,
    PAGE_BYTES,
    FileHeader,
    Lineage,
    arena_of,
    encode_keeper,
    file_path,
)
from medialane.arena.locks import live_slots, lock_range, unlock_range
from medialane.arena.view import ArenaView, open_file, read_header
from medialane.runtime.linux import last_error, libc
from medialane.runtime.private_files import try_lock
from medialane.types.errors import HandoverFailed, StartupFailed
from medialane.types.tensor import ArenaRange

logger = logging.getLogger(__name__)

#: Pages are allocated in pieces of this size (10 ms each), between which a prefault can be stopped.
PREFAULT_BYTES = 16 << 20

#: madvise(2), Linux 5.14; Python's mmap module does not define it.
MADV_POPULATE_WRITE = 23

_CREATE_TRIES = 16


class ArenaFile:
    """The file, its lock and the owner's mapping (`view`); created by `ArenaFile.create`."""

    def __init__(self, path: Path, lock: int, view: ArenaView, index: mmap.mmap) -> None:
        self.path = path
        self.view = view
        self.index = Index(memoryview(index).cast("Q"), view.id)
        #: Bytes that need not be prefaulted any more.
        self.usable_bytes = 0
        self._index_mapping = index
        self._lock: int | None = lock
        self._owner_pid = os.getpid()

    @classmethod
    def create(cls, config: ArenaConfig, lineage: Lineage = Lineage()) -> ArenaFile:  # noqa: B008 - immutable
        """Create an arena file with a random id. Raises StartupFailed, leaving no file behind."""
        config.validate()
        try:
            path, lock = _create_locked(config, lineage)
        except OSError as error:
            raise StartupFailed(f"cannot create the arena in {config.directory}: {error.strerror}") from error
        try:
            return cls._map(path, lock, config)
        except BaseException:  # includes KeyboardInterrupt: leave no file behind
            path.unlink()
            os.close(lock)
            raise

    @classmethod
    def take_over(cls, config: ArenaConfig, lineage: Lineage) -> ArenaFile | None:
        """Lock and map the file of an earlier owner of this lineage that has exited; None if there is none that fits.
        Files with other settings, or a damaged header, are removed."""
        for path in sorted(Path(config.directory).glob(FILE_GLOB)):
            lock = _open_abandoned(path, lineage) if FILE_NAME.fullmatch(path.name) else None
            if lock is None:
                continue
            try:
                header = read_header(lock, arena_of(path))
                if header.lineage == lineage and header.size_bytes == _file_bytes(config):
                    _check_locks(lock, header.arena)
                    return cls._map(path, lock, config)
                logger.info("an arena with other settings is removed: %s", path)
            except (OSError, ValueError, HandoverFailed) as error:
                logger.warning("an arena that cannot be used is removed: %s: %s", path, error)
            _discard(path, lock)
        return None

    @classmethod
    def _map(cls, path: Path, lock: int, config: ArenaConfig) -> ArenaFile:
        """Raises HandoverFailed, OSError."""
        view = ArenaView.open(arena_of(path), config.directory, writable=True)
        try:
            descriptor = open_file(view.id, config.directory, writable=True)
            try:
                num_bytes = index_bytes(view.size_bytes)
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                index = mmap.mmap(descriptor, num_bytes, flags=flags, offset=view.size_bytes)
            finally:
                os.close(descriptor)
        except BaseException:  # includes KeyboardInterrupt: leave nothing mapped
            view.close()
            raise
        return cls(path, lock, view, index)

    @property
    def end_bytes(self) -> int:
        """Offset of what follows the index."""
        return self.view.size_bytes + index_bytes(self.view.size_bytes)

    def keep_for(self, keeper: str) -> None:
        """Have `reap` spare this file while another process has the lock (`private_files`) of the file `keeper`. Raises
        ValueError if the path is too long."""
        if self._lock is not None:
            os.pwrite(self._lock, encode_keeper(keeper), KEEPER_AT)

    def prefault(self, stop: Event, on_progress: Callable[[int], object] = lambda _: None) -> int:
        """Allocate all pages of the arena, about 1 s per GiB; return the bytes allocated before `stop` was set, which
        `on_progress` gets after each piece.

        To be called in a thread, which is joined before `close`: it releases the GIL and changes no data, so entries
        may be written in the meantime. Until it has returned, a write to a new page is slow, and if the file system is
        full (because of other programs' files), it kills the writing process with SIGBUS. Raises StartupFailed if the
        file system is full.
        """
        done = self.usable_bytes
        if stop.is_set():
            return done
        with self.view.memory as memory:
            while done < memory.nbytes and not stop.is_set():
                nbytes = min(PREFAULT_BYTES, memory.nbytes - done)
                with memory[done : done + nbytes] as piece:
                    self._populate(piece, done)
                done += nbytes
                on_progress(done)
        return done

    def is_locked(self, entry: ArenaRange) -> bool:
        """Return whether a process is writing to `entry` (`fill`). Of one whose header is invalid, none will be later.

        The range is locked rather than queried: this orders what either side has stored before with what the other
        one loads after it. F_OFD_GETLK takes no lock in the kernel if the file has none.
        """
        if self._lock is None:
            return False
        try:
            if not lock_range(self._lock, entry):
                return True
            unlock_range(self._lock, entry)
        except OSError as error:
            if error.errno != errno.EINVAL:  # this kernel or sandbox has no such locks: no writer gets one either
                raise
        return False

    def live_slots(self) -> set[int]:
        """Return the slots whose clients live (`ClientSlot`)."""
        return set() if self._lock is None else live_slots(self._lock)

    def close(self, *, keep: bool = False) -> None:
        """Release the lock, and remove the file unless it is to be kept for the next owner. Idempotent. A child of
        os.fork() only closes its descriptor."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        if os.getpid() == self._owner_pid and not keep:
            self.path.unlink(missing_ok=True)
        os.close(lock)
        self.index.close()
        self._index_mapping.close()
        self.view.close()

    def _populate(self, piece: memoryview, offset: int) -> None:
        try:
            _madvise(piece, MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno == errno.EINVAL:
                self._allocate(offset, piece.nbytes)
            elif error.errno in (errno.EFAULT, errno.ENOMEM):
                raise StartupFailed(self._not_enough_space()) from error
            else:
                raise

    def _allocate(self, offset: int, nbytes: int) -> None:
        """For kernels without MADV_POPULATE_WRITE. Touching pages instead could overwrite concurrent writes."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # closed in the meantime
        try:
            os.posix_fallocate(descriptor, offset, nbytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise StartupFailed(self._not_enough_space()) from error
        finally:
            os.close(descriptor)

    def _not_enough_space(self) -> str:
        found = os.statvfs(self.path.parent)
        return not_enough_space(self.view.size_bytes, str(self.path.parent), found.f_bavail * found.f_frsize)


def _file_bytes(config: ArenaConfig) -> int:
    """Return the size of an arena, without its index."""
    return config.size_bytes - config.size_bytes % PAGE_BYTES


def _open_abandoned(path: Path, lineage: Lineage) -> int | None:
    """Return a descriptor of a file of this lineage, with its lock, if it has no owner; None otherwise."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None  # removed in the meantime, or another user's
    try:
        header = FileHeader.decode(os.pread(descriptor, PAGE_BYTES, 0))
        if header.lineage.owner == lineage.owner and _lock(descriptor) and os.fstat(descriptor).st_uid == os.geteuid():
            return descriptor
    except (OSError, ValueError):
        pass  # a pipe; of another version, or damaged: it is reaped
    os.close(descriptor)
    return None


def _check_locks(descriptor: int, arena: str) -> None:
    """Raise OSError where bytes of files cannot be locked: it is not known then which clients use the file."""
    header = ArenaRange(arena, 0, PAGE_BYTES, 0)
    lock_range(descriptor, header)
    unlock_range(descriptor, header)


def _create_locked(config: ArenaConfig, lineage: Lineage) -> tuple[Path, int]:
    """Create a file with its final name; return it and the descriptor that holds its lock."""
    size_bytes = _file_bytes(config)
    for _ in range(_CREATE_TRIES):
        header = FileHeader(secrets.token_hex(16), size_bytes, secrets.token_bytes(NONCE_BYTES), lineage)
        path = file_path(config.directory, header.arena)
        temporary = path.with_name(path.name + ".tmp")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if _lock(descriptor):
                os.ftruncate(descriptor, size_bytes)
                os.posix_fallocate(descriptor, size_bytes, index_bytes(size_bytes))
                os.pwrite(descriptor, header.encode(), 0)
                os.rename(temporary, path)
                return path, descriptor
        except BaseException:  # includes KeyboardInterrupt: leave no file behind
            _discard(temporary, descriptor)
            raise
        _discard(temporary, descriptor)
    raise FileExistsError(errno.EEXIST, "other processes keep removing the file")


def _discard(temporary: Path, descriptor: int) -> None:
    temporary.unlink(missing_ok=True)
    os.close(descriptor)


def _lock(descriptor: int) -> bool:
    return try_lock(descriptor) and os.fstat(descriptor).st_nlink > 0


def _madvise(piece: memoryview, advice: int) -> None:
    """Call madvise(2) without the GIL. mmap.madvise holds it, which blocked the event loop for 0.2 s."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(piece.nbytes), advice):
        raise last_error("madvise")
