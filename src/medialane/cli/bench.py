"""`medialane bench`: runs the checkout's `benchmarks/bench_*.py`, prints their tables and checks them against their
bars.

Benchmarks are not part of the package: they are next to it in the checkout, and share `benchmarks/harness.py`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from medialane.cluster.placement import find_hardware
from medialane.config import Config, enter_environ, process_environ
from medialane.types.errors import StartupFailed

#: The benchmarks of a checkout: this file is src/medialane/cli/bench.py.
FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"

_PREFIX = "bench_"
_ALL = "all"
#: Takes a quarter of an hour or more, or installs a peer: runs only by name.
_NOT_IN_ALL = frozenset({"first_answer", "render_start", "sessions", "soak", "start"})


def add_arguments(parser: argparse.ArgumentParser, folder: Path = FOLDER) -> None:
    known = ", ".join([*names(folder), _ALL]) if folder.is_dir() else "only in a checkout"
    parser.add_argument("name", metavar="NAME", help=f"benchmark: {known} (all but {', '.join(sorted(_NOT_IN_ALL))})")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write machine, versions, commit, results and bars to this file"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, as a smoke test: figures are not meaningful"
    )
    parser.add_argument(
        "--other",
        type=Path,
        metavar="FOLDER",
        help="start: another checkout, to compare with (default: commit 4f951fe)",
    )
    parser.add_argument(
        "--observed",
        action="store_true",
        help="serve, stream, loop: our servers with the page open, a log of requests and a tenth of the traces",
    )
    parser.add_argument("--requests", type=int, metavar="N", help="soak: how many requests (default: 100000)")


def run(args: argparse.Namespace, folder: Path = FOLDER) -> int:
    """Run the benchmark, or all of `folder`; 0 if every bar is reached, 1 if one is missed. The JSON file is written
    after each, so that no result is lost. Raises StartupFailed."""
    # vLLM reads some settings from the environment only, when it is imported. The tiny model is a folder, like this.
    # The servers of the benchmarks are on loopback, and asked without a key.
    on_gpu = bool(find_hardware(process_environ()).gpus)
    own = {"VLLM_API_KEY": "", "MEDIALANE_API_KEYS": "", "MEDIALANE_KEYS": ""}
    enter_environ(Config(), None, str(folder), (), on_gpu=on_gpu, own=own)
    wanted = _wanted(folder, args.name)
    if args.requests is not None and args.requests < 1:
        raise StartupFailed("--requests must be positive")
    if args.other is not None and not (args.other / "src" / "medialane").is_dir():
        raise StartupFailed(f"--other {args.other}: not a checkout of medialane")
    if args.json is not None and not args.json.parent.is_dir():
        raise StartupFailed(f"--json {args.json}: there is no folder {args.json.parent}")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # so that processes started by a benchmark can import from it, too
    harness = importlib.import_module("harness")
    machine = harness.machine()
    options = harness.Options(quick=args.quick, num_requests=args.requests, other=args.other, observed=args.observed)
    reports: list[Any] = []
    for benchmark in wanted:
        print(f"running {benchmark}: {_load(benchmark).ABOUT}", flush=True)
        report = _load(benchmark).run(options)
        print(harness.show(report), flush=True)
        reports.append(report)
        if args.json is not None:
            args.json.write_bytes(harness.document(reports, machine))
    return 0 if all(bar.ok for report in reports for bar in report.bars) else 1


def names(folder: Path) -> list[str]:
    """Return the names of the benchmarks in a folder."""
    return sorted(path.stem.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*.py"))


def _wanted(folder: Path, name: str) -> list[str]:
    if not folder.is_dir():
        raise StartupFailed(
            "benchmarks run from a checkout, which this installation is not: git clone the repository, pip install -e ."
        )
    known = names(folder)
    if name == _ALL:
        return [each for each in known if each not in _NOT_IN_ALL]
    if name not in known:
        raise StartupFailed(f"there is no benchmark {name!r}; there are {', '.join(known)} and {_ALL}")
    return [name]


def _load(name: str) -> Any:
    return importlib.import_module(_PREFIX + name)
