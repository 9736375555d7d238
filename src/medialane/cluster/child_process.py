"""One life of one part: a child process that leads its own session, so that nothing of it can be left behind.

A part may have children of its own (a worker has vLLM's engine core, that has more). They stay in the part's process
group. When the part's first process ends, however it ends, the whole group is killed before anybody is told: a
restarted worker finds no predecessor's engine on its GPU. The group's id cannot be given to strangers meanwhile: its
leader is not reaped before the group has been killed.

Two things keep parts from outliving a supervisor that was killed: the kernel's parent-death signal asks the part
itself, and the guard then kills what is left of the group.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from medialane.cluster.process_group import CLEANUP_S, kill_members, members, send
from medialane.core.parent_death import dies_with_this_process

_POLL_S = 0.02
#: SIGKILL takes effect when the kernel lets it: a process that frees much memory, or a GPU's, needs a moment.
_GROUP_END_S = 10.0


class ChildProcess:
    """A running child process and its group. Bound to the event loop that spawned it."""

    def __init__(self, process: subprocess.Popen[bytes], started_at: float) -> None:
        self._process = process
        self._started_at = started_at
        self._lifetime_s: float | None = None
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_end)

    @classmethod
    def spawn(cls, argv: Sequence[str], environ: Mapping[str, str], output: int) -> ChildProcess:
        """Start `argv` with the whole environment `environ`; what it prints goes to the descriptor `output`.

        Call it from the main thread: the kernel takes the end of the calling thread for the end of the parent.
        Raises OSError when there is nothing to start.
        """
        started_at = time.monotonic()
        process = subprocess.Popen(  # noqa: S603 - our own command lines, no shell
            list(argv),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=dies_with_this_process(signal.SIGTERM),
        )
        return cls(process, started_at)

    @property
    def pid(self) -> int:
        """Of the first process, and of the group and session that it leads."""
        return self._process.pid

    @property
    def lifetime_s(self) -> float:
        return time.monotonic() - self._started_at if self._lifetime_s is None else self._lifetime_s

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def wait(self) -> int:
        """Wait until the process has ended and its group is gone. Returns the exit status, -N for signal N."""
        await self._ended.wait()
        try:
            self.kill()
            await self._empty(CLEANUP_S)
        finally:
            if self._process.returncode is None:
                send(self.pid, signal.SIGKILL)
        await self._empty(_GROUP_END_S)
        return self._reap()

    def terminate(self) -> None:
        """Ask the first process to stop; what it started is its own business for now."""
        if self._process.returncode is None:  # not reaped: the number is still its own
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the whole group, but for what cleans up after it; `wait` sees to that."""
        if self._process.returncode is None:
            kill_members(self.pid)

    async def stop(self, timeout_s: float) -> int:
        """Ask, wait for `timeout_s`, kill. Returns the exit status. Cancelled, it kills at once."""
        self.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            pass  # it is killed for that
        finally:
            self.kill()
        return await self.wait()

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._lifetime_s = time.monotonic() - self._started_at
        self._ended.set()

    async def _empty(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while members(self.pid):  # noqa: ASYNC110 - they are strangers to us: nobody tells
                    await asyncio.sleep(_POLL_S)

    def _reap(self) -> int:
        status = self._process.wait()
        with suppress(ChildProcessError):  # as process 1 of a container we inherit orphans, and must reap them
            while os.waitpid(-self.pid, os.WNOHANG) != (0, 0):
                pass
        return status


def describe_exit(status: int) -> str:
    """`exit status 1`, `killed by SIGKILL`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
