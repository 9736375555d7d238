"""How long a newcomer waits for the first answer about an image, on a machine that has only git and Python.

Each round clones the HEAD of this repository, runs `make venv` with empty caches (pip's, vLLM's and our own), then
`medialane serve` as README.md says for a machine without a GPU, and asks about an image. The clone comes from this disk
and packages from the index that pip is configured for: `clone` and `install` depend on how near that is.
The tiny model, built in a second with what is installed, stands for a model that is there. A figure is the median over
the rounds. It needs 3 GB below TMPDIR.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from harness import REPOSITORY, Bar, Options, Report, median
from medialane.tools.check import server_process
from start_probe import Client, seconds_until

ABOUT = "git clone to the first image answer, with empty caches: clone, install, start, answer"

#: Of README.md, for a machine without a GPU.
FLAGS = ("--max-model-len", "8192", "--enforce-eager", "--limit-mm-per-prompt", '{"image": 4, "video": 0}')
WORKERS = ("--workers", "2")
MOST_S = 300.0

#: What is set for tests and benchmarks, or knows this environment.
_NOT_FRESH = re.compile("PYTHON|VLLM_|MEDIALANE_|OMP_|MAKE|VIRTUAL_ENV|XDG_CACHE|PIP_CACHE|PIP_NO_CACHE|TORCH")


class Phases:
    """Seconds by phase, in order; a phase begins where the last one has ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def ended(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._began
        self._began = now
        print(f"  {name}: {self.seconds[name]:.1f} s", flush=True)


def run(options: Options) -> Report:
    rounds = [_round() for _ in range(options.rounds or (1 if options.quick else 3))]
    rows: list[dict[str, object]] = [{"phase": name, "s": median(each[name] for each in rounds)} for name in rounds[0]]
    whole = median(sum(each.values()) for each in rounds)
    rows.append({"phase": "all", "s": whole})
    bar = Bar("git clone to the first image answer, s", whole, MOST_S, "at most")
    return Report("first_answer", {"first answer": rows}, [bar])


def _round() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="ml-first-") as folder:
        return _measure(Path(folder))


def _measure(folder: Path) -> dict[str, float]:
    """Return the seconds of each phase. Raises RuntimeError, CalledProcessError or StartupFailed if one fails."""
    given = {name: value for name, value in os.environ.items() if not _NOT_FRESH.match(name)}
    environ = given | {"XDG_CACHE_HOME": str(folder / "caches"), "HF_HUB_OFFLINE": "1"}
    clone = folder / "medialane"
    phases = Phases()
    subprocess.run(["git", "clone", "--quiet", "--no-local", str(REPOSITORY), str(clone)], check=True)
    phases.ended("clone")
    _make_venv(clone, environ, phases)
    model = _build_model(clone, environ)
    phases.ended("model")
    asyncio.run(_first_answer(clone, model, environ, phases))
    return phases.seconds


def _make_venv(clone: Path, environ: Mapping[str, str], phases: Phases) -> None:
    command = ["make", "--no-print-directory", "venv", f"PYTHON={_base_python()}", "EXTRA=cpu"]
    subprocess.run(command, cwd=clone, env=environ, check=True)
    phases.ended("install")


def _base_python() -> str:
    """The Python from which this one's environment was made: a newcomer has only such a one."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


def _build_model(clone: Path, environ: Mapping[str, str]) -> str:
    """Build the tiny model with what is installed in the clone."""
    script = "import os; from medialane.testing.tiny_model import *; print(build_tiny_model(cache_folder(os.environ)))"
    command = [str(clone / ".venv" / "bin" / "python"), "-c", script]
    return subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1]


async def _first_answer(clone: Path, model: str, environ: Mapping[str, str], phases: Phases) -> None:
    command = ["-m", "medialane", "serve", model, *WORKERS]
    python, log = str(clone / ".venv" / "bin" / "python"), clone.parent / "serve.log"
    async with server_process(
        "medialane", command, ["--", *FLAGS], model=model, environ=environ, log=log, stop_s=60, python=python
    ) as server:
        phases.ended("start")
        client = Client(server.base_url, model)
        await seconds_until(partial(client.answers, client.image(1)), since=time.perf_counter())
        phases.ended("answer")
