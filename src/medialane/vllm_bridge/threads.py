"""The number of threads of torch's CPU operations in a process that is a fork of one that has imported torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_DEFAULT = torch.get_num_threads()


def set_num_threads(environ: Mapping[str, str]) -> None:
    """Use as many threads as a process that is started with `environ`: OpenMP reads its variable when it is loaded.
    Starts none."""
    number = environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(number) if number.isdecimal() and int(number) else _DEFAULT)
