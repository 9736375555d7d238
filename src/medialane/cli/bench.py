"""`medialane bench`: runs the benchmarks of a checkout. They are not part of the package: they are next to it, and have
their command line in `benchmarks/harness.py`."""

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


def add_arguments(parser: argparse.ArgumentParser, folder: Path = FOLDER) -> None:
    """Raises StartupFailed without a checkout."""
    _harness(folder).add_arguments(parser, folder)


def run(args: argparse.Namespace, folder: Path = FOLDER) -> int:
    """Run the benchmark, or all of `folder`; 0 if every bar is reached, 1 if one is missed. Raises StartupFailed."""
    # vLLM reads some settings from the environment only, when it is imported. The tiny model is a folder, like this.
    # The servers of the benchmarks are on loopback, and asked without a key.
    on_gpu = bool(find_hardware(process_environ()).gpus)
    own = {"VLLM_API_KEY": "", "MEDIALANE_API_KEYS": "", "MEDIALANE_KEYS": ""}
    enter_environ(Config(), None, str(folder), (), on_gpu=on_gpu, own=own)
    return int(_harness(folder).run(args, folder))


def _harness(folder: Path) -> Any:
    if not folder.is_dir():
        raise StartupFailed(
            "benchmarks run from a checkout, which this installation is not: git clone the repository, pip install -e ."
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # so that processes started by a benchmark can import from it, too
    return importlib.import_module("harness")
