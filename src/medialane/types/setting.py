"""How the packages' configurations define their settings, and sizes in messages.

A setting is a field of a `msgspec.Struct`. Its `name` is the user-visible one: the flag is `--` and the name, the
environment variable MEDIALANE_ and the name in capitals, the key in the TOML file the name itself. The docstring below
it is its help text, as in vLLM's configurations; its bounds are its type's.
"""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import msgspec

from medialane.types.errors import StartupFailed

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
#: Set by its environment variable only: command lines and configuration files are readable by other users.
SecretText = Annotated[str, msgspec.Meta(extra={"is_secret": True})]
SecretTexts = Annotated[tuple[str, ...], msgspec.Meta(extra={"is_secret": True})]

_Config = TypeVar("_Config", bound=msgspec.Struct)


def is_secret(kind: object) -> bool:
    """Whether the type of a field is SecretText or SecretTexts."""
    return kind in (SecretText, SecretTexts)


def hidden(config: _Config) -> _Config:
    """Return a configuration to be shown: each secret that is set is `***`."""
    shown: dict[str, Any] = {}
    for field in msgspec.structs.fields(config):
        if is_secret(field.type) and getattr(config, field.name):
            shown[field.name] = "***" if field.type == SecretText else ("***",)
    return msgspec.structs.replace(config, **shown)


def check_bounds(config: msgspec.Struct) -> None:
    """Raise StartupFailed naming the first field whose value is outside the bounds of its type."""
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        for bound in getattr(field.type, "__metadata__", ()):
            if bound.gt is not None and not value > bound.gt:
                raise StartupFailed(f"{field.name} must be positive")
            if bound.ge is not None and not value >= bound.ge:
                raise StartupFailed(f"{field.name} must {f'be at least {bound.ge}' if bound.ge else 'not be negative'}")


def descriptions(config: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstrings of the fields, each on one line."""
    (definition,) = ast.parse(inspect.getsource(config)).body
    texts = {}
    for field, below in pairwise(definition.body if isinstance(definition, ast.ClassDef) else ()):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: float) -> str:
    """Return a size as people read it, with at most one decimal place: 1.5 GiB, 300 MiB, 64 KiB."""
    exponent = 0
    while num_bytes >= 1024 and exponent < len(_UNITS) - 1:
        num_bytes, exponent = num_bytes / 1024, exponent + 1
    return f"{num_bytes:.1f}".removesuffix(".0") + f" {_UNITS[exponent]}"
