"""Parses the few vLLM flags that matter before vLLM is loaded, as vLLM's parser would."""

from __future__ import annotations

from collections.abc import Sequence

from medialane.core.errors import StartupFailed


def flag_value(vllm_args: Sequence[str], *names: str) -> str | None:
    """Return the last value of a flag with any of `names`; None if it is absent.

    As in vLLM's parser, `--a-b v`, `--a-b=v` and `--a_b v` are the same.
    """
    found = None
    for position, arg in enumerate(vllm_args):
        name, equals, value = arg.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name not in names:
            continue
        if equals:
            found = value
        elif position + 1 < len(vllm_args):
            found = vllm_args[position + 1]
    return found


def has_flag(vllm_args: Sequence[str], *names: str) -> bool:
    """Return whether a flag is present, with or without a value."""
    return any(arg.partition("=")[0].replace("_", "-") in names for arg in vllm_args)


def gpus_per_worker(vllm_args: Sequence[str]) -> int:
    """Return the number of GPUs of one engine. Raises StartupFailed for sizes that are not numbers."""
    size = _positive(vllm_args, "--tensor-parallel-size", "-tp") * _positive(
        vllm_args, "--pipeline-parallel-size", "-pp"
    )
    if has_flag(vllm_args, "--data-parallel-size-local", "-dpl"):
        return size * _positive(vllm_args, "--data-parallel-size-local", "-dpl")
    return size * _positive(vllm_args, "--data-parallel-size", "-dp")


def ranks_per_worker(vllm_args: Sequence[str]) -> int:
    """Return the number of data-parallel ranks of one engine. Raises StartupFailed if it is not a number."""
    return _positive(vllm_args, "--data-parallel-size", "-dp")


def _positive(vllm_args: Sequence[str], *names: str) -> int:
    value = flag_value(vllm_args, *names) or "1"
    if not value.isdigit() or int(value) < 1:
        raise StartupFailed(f"{names[0]} {value}: must be a whole number of at least 1")
    return int(value)
