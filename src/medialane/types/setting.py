"""How the rooms define their settings, and what settings have in common: names of hosts, and sizes in messages.

A setting is a field of a `msgspec.Struct`. Its `name` is the user-visible one: the flag is `--` and the name, the
environment variable MEDIALANE_ and the name in capitals, the key in the TOML file the name itself. The docstring below
it is its help text, as in vLLM's configurations; its bounds are its type's.
"""

from __future__ import annotations

import ast
import inspect
import re
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from itertools import pairwise
from typing import Annotated, Any, Final, TypeVar

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


def format_bytes(num_bytes: float) -> str:
    """Return a size as people read it, with at most one decimal place: 1.5 GiB, 300 MiB, 64 KiB."""
    units, exponent = ("B", "KiB", "MiB", "GiB", "TiB"), 0
    while num_bytes >= 1024 and exponent < len(units) - 1:
        num_bytes, exponent = num_bytes / 1024, exponent + 1
    return f"{num_bytes:.1f}".removesuffix(".0") + f" {units[exponent]}"


#: RFC 1123, plus the underscore, which occurs in names of containers.
_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.IGNORECASE | re.ASCII)
#: RFC 1035, section 2.3.4: 255 bytes on the wire are 253 characters.
_MAX_CHARS: Final = 253
#: An IPv6 address may name its link by interface (RFC 4007, section 11).
_SCOPE: Final = re.compile(r"[a-z0-9_.-]{1,15}", re.IGNORECASE | re.ASCII)


def ascii_host(host: str) -> str:
    """Return the host name or literal address (IPv6 without brackets) in ASCII, international names in punycode.

    Raises ValueError if it is neither: before the resolver would, with various errors.
    """
    with suppress(ValueError):  # of `ipaddress` or a codec: their messages differ
        if ":" not in host:
            return _name(host)
        address = IPv6Address(host)
        if address.scope_id is None or _SCOPE.fullmatch(address.scope_id):
            return str(address)
    raise ValueError(f"{host!r} is not a host name or IP address")


def ascii_name(name: str) -> str:
    """Return a host name of a URL in lower case, an international one in punycode (IDNA 2008, like vLLM). Raises
    UnicodeError for others, also for look-alikes of ASCII: none is mapped to it."""
    name = name.lower()
    if name.isascii():
        return name
    import idna  # its tables are large, and such names rare

    return idna.encode(name, strict=True, std3_rules=True).decode()


def _name(host: str) -> str:
    name = host.encode("idna").decode("ascii")  # like `socket`
    labels = name.removesuffix(".").split(".")
    if not all(map(_LABEL.fullmatch, labels)) or len(name) > _MAX_CHARS:
        raise ValueError(name)
    if labels[-1].isdigit():  # no top-level domain is a number (RFC 3696, section 2)
        return str(IPv4Address(name))
    return name
