"""Compares the table of seams with the sources of a vLLM that is not installed: as the probe does, but by `ast`.

`python tests/vllm_sources.py 0.33.0` downloads that version's wheel, keeps its Python files in the cache folder, and
prints what an upgrade to it would break. What only running code shows (an attribute that an outside base class may
have, parameters of what is not a plain function or class) counts as unchanged.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from medialane.testing.tiny_model import cache_folder
from medialane.vllm_bridge.seams.table import GROUPS, Seam

SRC = Path(__file__).parents[1] / "src"

#: Of 336 MB, at 4 MB/s.
DOWNLOAD_S = 300


class DownloadFailed(Exception):
    """No index here has the wheel; the message is pip's."""


def downloaded_sources(version: str) -> Path:
    """Return the folder with the Python files of vLLM's wheel, downloaded once. Raises DownloadFailed."""
    folder = cache_folder(os.environ) / f"vllm-{version}-sources"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", f"vllm=={version}", "--no-deps", "--only-binary=:all:"]
        command += ["--quiet", "--no-cache-dir", "--dest", scratch]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise DownloadFailed(f"{error}\n{error.stderr}") from error
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(f"{scratch}/sources", [name for name in archive.namelist() if name.endswith(".py")])
        os.rename(f"{scratch}/sources", folder)
    return folder


class Node(NamedTuple):
    """A name's definition: the module that has it, and the statement. None: it is defined outside the sources."""

    module: str
    statement: ast.stmt | None


class Sources:
    """The packages in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = cache(self._read_names)

    def faults(self, seam: Seam) -> Iterator[str]:
        """Yield what differs from the table, worded as by the probe."""
        found = self.resolve(seam.where)
        if found is None:
            yield "is missing"
            return
        if seam.parameters is not None and (why := self._other_parameters(found, seam)):
            yield why
        yield from (f"has no attribute {name}" for name in seam.attributes if not self._has(found, name))
        if seam.called_in:
            name = seam.lookup or seam.where.rpartition(":")[2].rpartition(".")[2]
            caller = self.resolve(seam.called_in)
            if caller is None:
                yield f"is used in {seam.called_in}, which is missing"
            elif caller.statement is not None and name not in _used_names(caller.statement):
                yield f"is no longer used in {seam.called_in} ({name})"

    def resolve(self, where: str) -> Node | None:
        """Return the definition of `module:qualified.name`; None if there is none."""
        module, _, path = where.partition(":")
        if self._path(module) is None:
            return None
        found: Node | None = Node(module, ast.Module([], []))  # type: ignore[arg-type]  # stands for the whole module
        for name in filter(None, path.split(".")):
            found = self._member(found, name)
            if found is None:
                return None
        return found

    def _path(self, module: str) -> Path | None:
        path = self._folder.joinpath(*module.split("."))
        return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.is_file()), None)

    def _read_names(self, module: str) -> dict[str, ast.stmt]:
        path = self._path(module)
        assert path is not None
        return dict(_defined(ast.parse(path.read_text()).body))

    def _member(self, owner: Node, name: str) -> Node | None:
        match owner.statement:
            case None:
                return Node(owner.module, None)
            case ast.Module():
                return self._global(owner.module, name)
            case ast.ClassDef():
                for cls in self._mro(owner):
                    if cls.statement is None:
                        return cls
                    statement = dict(_defined(cls.statement.body)).get(name)  # type: ignore[attr-defined]
                    if statement is not None:
                        return Node(cls.module, statement)
                return None
        return Node(owner.module, None)  # an instance, whose class is not known here

    def _global(self, module: str, name: str) -> Node | None:
        statement = self._names(module).get(name)
        if isinstance(statement, ast.ImportFrom):
            source = self._imported_from(module, statement)
            if self._path(source) is None:
                is_ours = source.partition(".")[0] == module.partition(".")[0]
                return None if is_ours else Node(source, None)
            original = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
            is_submodule = (source, original) == (module, name)  # `from . import name` in a package
            return (None if is_submodule else self._global(source, original)) or self.resolve(f"{source}.{original}")
        if statement is None:
            return self.resolve(f"{module}.{name}")
        return Node(module, None if isinstance(statement, ast.Import) else statement)

    def _imported_from(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        path = self._path(module)
        levels = statement.level - (path is not None and path.name == "__init__.py")
        package = module.split(".")[: len(module.split(".")) - levels]
        return ".".join([*package, *filter(None, [statement.module])])

    def _mro(self, cls: Node) -> Iterator[Node]:
        """Yield the class, then its bases, depth first. A base from elsewhere has no statement."""
        yield cls
        bases = cls.statement.bases if isinstance(cls.statement, ast.ClassDef) else []
        for base in bases:
            words = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).split(".")
            if words[-1] in ("Generic", "Protocol", "ABC", "object", "NamedTuple", "Struct", "str", "Enum", "Thread"):
                continue
            found = self._global(cls.module, words[0])
            for word in words[1:]:
                found = found and self._member(found, word)
            if found is None or not isinstance(found.statement, ast.ClassDef):
                yield Node(cls.module, None)
            else:
                yield from self._mro(found)

    def _has(self, owner: Node, name: str) -> bool:
        if self._member(owner, name) is not None:
            return True
        if not isinstance(owner.statement, ast.ClassDef):
            return False
        return any(cls.statement is None or name in _set_attributes(cls.statement) for cls in self._mro(owner))

    def _other_parameters(self, found: Node, seam: Seam) -> str:
        actual = self._parameters(found)
        expected = seam.parameters or ()
        if actual is None:
            return ""
        if seam.kind != "call":
            return "" if tuple(actual) == expected else f"has the parameters {tuple(actual)} instead of {expected}"
        missing = [name for name in expected if name not in actual]
        required = [name for name, is_required in actual.items() if is_required and name not in expected]
        return ", ".join([f"has no parameter {n}" for n in missing] + [f"requires {n}" for n in required])

    def _parameters(self, found: Node) -> dict[str, bool] | None:
        """Return the names, and whether each is required; None if that is not known."""
        if isinstance(found.statement, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(one) for one in found.statement.decorator_list}
            return _signature(found.statement, skipped=int("classmethod" in decorators))
        if not isinstance(found.statement, ast.ClassDef):
            return None
        for cls in self._mro(found):
            for statement in getattr(cls.statement, "body", ()):
                if isinstance(statement, ast.FunctionDef) and statement.name in ("__init__", "__new__"):
                    return _signature(statement, skipped=1)
        fields: dict[str, bool] = {}
        for cls in reversed(list(self._mro(found))):
            if cls.statement is None:
                return None
            for statement in cls.statement.body:  # type: ignore[attr-defined]
                if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
                    fields[ast.unparse(statement.target)] = statement.value is None
        return fields


def _defined(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that statements define, those in branches included."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name, statement
            case ast.Assign():
                targets = [name for target in statement.targets for name in ast.walk(target)]
                yield from ((name.id, statement) for name in targets if isinstance(name, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, statement
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name.partition(".")[0], statement) for alias in statement.names)
            case ast.If() | ast.Try() | ast.With():
                yield from _defined(statement.body)
                yield from _defined(getattr(statement, "orelse", ()))
                for handler in getattr(statement, "handlers", ()):
                    yield from _defined(handler.body)


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef, *, skipped: int) -> dict[str, bool]:
    """Return the parameters, and whether each is required."""
    positional = [*function.args.posonlyargs, *function.args.args]
    num_required = len(positional) - len(function.args.defaults)
    found = {one.arg: number < num_required for number, one in enumerate(positional) if number >= skipped}
    if function.args.vararg:
        found[function.args.vararg.arg] = False
    for one, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        found[one.arg] = default is None
    if function.args.kwarg:
        found[function.args.kwarg.arg] = False
    return found


def _used_names(statement: ast.stmt) -> set[str]:
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
    imported = {alias.name for node in ast.walk(statement) if isinstance(node, ast.ImportFrom) for alias in node.names}
    return names | attributes | imported


def _set_attributes(statement: ast.stmt) -> set[str]:
    """Return the names that methods assign to an attribute of anything, as the probe finds them in bytecode."""
    return {
        node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def broken_seams(folder: Path) -> dict[str, str]:
    """Return what differs in each seam of the table, by `where`."""
    sources = Sources(folder)
    seams = [seam for group in GROUPS for seam in group.seams if seam.where.startswith("vllm.")]
    return {seam.where: ", ".join(faults) for seam in seams if (faults := list(sources.faults(seam)))}


def broken_imports(folder: Path) -> list[str]:
    """Return the names of vLLM, as `module:name`, that medialane imports and the sources do not have. One import of a
    `try` with a fallback is enough."""
    sources = Sources(folder)
    return sorted({name for path in SRC.rglob("*.py") for name in _missing(sources, ast.parse(path.read_text()))})


def _missing(sources: Sources, node: ast.AST) -> list[str]:
    """Return the imported names that the sources lack: of a `try`, of the branch that lacks least."""
    if isinstance(node, ast.ImportFrom):
        if (node.module or "").partition(".")[0] != "vllm":
            return []
        names = [f"{node.module}:{alias.name}" for alias in node.names]
        return [name for name in names if sources.resolve(name) is None]
    if isinstance(node, ast.Try) and node.handlers:
        branches = [ast.Module(node.body, []), *node.handlers]
        return min((_missing(sources, branch) for branch in branches), key=len)
    return [name for child in ast.iter_child_nodes(node) for name in _missing(sources, child)]


def _main(version: str) -> None:
    folder = downloaded_sources(version)
    lines = [f"{where} {why}" for where, why in broken_seams(folder).items()]
    lines += [f"{name} is imported by medialane and is missing" for name in broken_imports(folder)]
    sys.stdout.write("\n".join(lines or ["no break"]) + "\n")


if __name__ == "__main__":
    _main(sys.argv[1])
