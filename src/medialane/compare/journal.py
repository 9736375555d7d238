"""The folder of a comparison: what is compared, and each reply as it came, so that it can go on after an interruption.

`comparison.json` says what is compared. Each turn has a file of replies, one a line, and one of facts, which is written
at its end, whole or interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

import msgspec

from medialane.compare.reply import Reply
from medialane.core.errors import StartupFailed
from medialane.core.private_file import private, write_private

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
        path = folder / _MANIFEST
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                write_private(path, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
                return cls(folder)
            earlier = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError) as error:
            raise StartupFailed(f"--out {folder}: {error}") from error
        other = [n for n in Manifest.__struct_fields__ if getattr(earlier, n) != getattr(manifest, n)]
        if other:
            values = "; ".join(f"{n} is {getattr(earlier, n)}, not {getattr(manifest, n)}" for n in other)
            raise StartupFailed(f"--out {folder} has another comparison ({values}): choose another folder")
        return cls(folder)

    def turn(self, side: int, name: str, number: int) -> Turn:
        """Return what there is of a turn."""
        facts, replies = TurnFacts(name, number), list[Reply]()
        with suppress(FileNotFoundError):
            facts = msgspec.json.decode(self._facts(side, number).read_bytes(), type=TurnFacts)
        with suppress(FileNotFoundError), self._replies(side, number).open("rb") as file:
            # The last line may have been cut off, if the machine went down.
            replies = [msgspec.json.decode(line, type=Reply) for line in file if line.endswith(b"\n")]
        return Turn(facts, tuple(replies))

    def writer(self, side: int, number: int) -> ReplyWriter:
        """Raises StartupFailed."""
        path = self._replies(side, number)
        with writing(self.folder):
            return ReplyWriter(self.folder, open(path, "ab", opener=private))

    def end(self, side: int, facts: TurnFacts) -> None:
        """Write the facts of a turn, whole or not at all. Raises StartupFailed."""
        path = self._facts(side, facts.round)
        new = path.with_suffix(".new")
        with writing(self.folder):
            write_private(new, msgspec.json.encode(facts) + b"\n")
            os.replace(new, path)

    def _replies(self, side: int, number: int) -> Path:
        return self.folder / f"turn-{number}-{side}.jsonl"

    def _facts(self, side: int, number: int) -> Path:
        return self.folder / f"turn-{number}-{side}.json"


class ReplyWriter:
    """Appends replies to a turn. Use it in a `with`."""

    def __init__(self, folder: Path, file: IO[bytes]) -> None:
        self._folder = folder
        self._file = file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with writing(self._folder):
            self._file.close()

    def add(self, reply: Reply) -> None:
        """Raises StartupFailed."""
        with writing(self._folder):
            self._file.write(msgspec.json.encode(reply) + b"\n")
            self._file.flush()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise StartupFailed, with the folder's name, if the block cannot write."""
    try:
        yield
    except OSError as error:
        raise StartupFailed(f"--out {folder}: {error.strerror}") from error
