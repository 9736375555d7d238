"""The folder of a comparison: what is compared, and each reply as it came, so that it can go on after an interruption.

`comparison.json` says what is compared. Each turn has a file of replies, one a line, and one of facts, which is written
at its end, whole or interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec

from medialane.runtime.private_files import private, write_private
from medialane.tools.compare.reply import Reply
from medialane.types.errors import StartupFailed

_MANIFEST = "comparison.json"


class Manifest(msgspec.Struct, frozen=True):
    """What must be the same for a comparison to go on."""

    model: str
    requests: str
    digest: str
    num_requests: int
    sides: tuple[str, ...]
    vllm_flags: tuple[str, ...]
    pace: str
    as_sent: bool


class TurnFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a turn beside its replies. `cpu_s` is the time of all processes of the server, None if it runs
    elsewhere; `counters` is by how much metrics of it have grown. `num_parts` is more than one if it was interrupted,
    and went on with a server that was started again."""

    side: str
    round: int
    is_whole: bool = False
    wall_s: float = 0.0
    cpu_s: float | None = None
    counters: dict[str, float] = {}
    num_parts: int = 0

    def plus(self, wall_s: float, cpu_s: float | None, counters: dict[str, float], *, is_whole: bool) -> Self:
        """Return the facts with those of one more part."""
        names = self.counters.keys() | counters
        summed = {name: self.counters.get(name, 0.0) + counters.get(name, 0.0) for name in names}
        has_cpu = cpu_s is not None and (self.cpu_s is not None or not self.num_parts)
        return msgspec.structs.replace(
            self,
            is_whole=is_whole,
            wall_s=self.wall_s + wall_s,
            cpu_s=(self.cpu_s or 0.0) + (cpu_s or 0.0) if has_cpu else None,
            counters=summed,
            num_parts=self.num_parts + 1,
        )


class Turn(msgspec.Struct, frozen=True):
    facts: TurnFacts
    replies: tuple[Reply, ...] = ()


class Journal:
    """A folder of one comparison."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def opened(cls, folder: Path, manifest: Manifest) -> Journal:
        """Begin a comparison in a folder, or go on with the same one. Raises StartupFailed if another is there."""
        journal, path = cls(folder), folder / _MANIFEST
        with journal._writing():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                journal.write(_MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
                return journal
            try:
                earlier = msgspec.json.decode(path.read_bytes(), type=Manifest)
            except msgspec.DecodeError as error:
                raise StartupFailed(f"--out {folder}: {_MANIFEST}: {error}") from error
        other = [n for n in Manifest.__struct_fields__ if getattr(earlier, n) != getattr(manifest, n)]
        if other:
            values = "; ".join(f"{n} is {getattr(earlier, n)}, not {getattr(manifest, n)}" for n in other)
            raise StartupFailed(f"--out {folder} has another comparison ({values}): choose another folder")
        return journal

    def turn(self, side: int, name: str, number: int) -> Turn:
        """Return what there is of a turn."""
        facts, replies = TurnFacts(name, number), list[Reply]()
        with suppress(FileNotFoundError):
            facts = msgspec.json.decode(self._facts(side, number).read_bytes(), type=TurnFacts)
        with suppress(FileNotFoundError), self._replies(side, number).open("rb") as file:
            for line in file:
                # One may be cut off, where the disk was full or the machine went down: it is asked for again.
                with suppress(msgspec.DecodeError):
                    replies.append(msgspec.json.decode(line, type=Reply))
        return Turn(facts, tuple(replies))

    @contextmanager
    def writer(self, side: int, number: int) -> Iterator[Callable[[Reply], None]]:
        """Yield a function that appends a reply to a turn. Both raise StartupFailed."""
        path = self._replies(side, number)
        with self._writing():
            is_cut_off = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
            file = open(path, "ab", opener=private)  # noqa: SIM115 - closed below

        def append(line: bytes) -> None:
            with self._writing():
                file.write(line + b"\n")
                file.flush()

        try:
            if is_cut_off:
                append(b"")
            yield lambda reply: append(msgspec.json.encode(reply))
        finally:
            with self._writing():
                file.close()

    def end(self, side: int, facts: TurnFacts) -> None:
        """Write the facts of a turn. Raises StartupFailed."""
        self.write(self._facts(side, facts.round).name, msgspec.json.encode(facts) + b"\n")

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the folder, whole or not at all. Raises StartupFailed."""
        new = self.folder / f"{name}.new"
        with self._writing():
            write_private(new, data)
            os.replace(new, self.folder / name)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise StartupFailed, with the folder's name, if the block cannot write."""
        try:
            yield
        except OSError as error:
            raise StartupFailed(f"--out {self.folder}: {error.strerror}") from error

    def _replies(self, side: int, number: int) -> Path:
        return self.folder / f"turn-{number}-{side}.jsonl"

    def _facts(self, side: int, number: int) -> Path:
        return self.folder / f"turn-{number}-{side}.json"
