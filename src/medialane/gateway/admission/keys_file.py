"""The file of `--keys`: one JSON object a line for each tenant, with the hash of its key and its limits.

    {"name": "search", "sha256": "9f86d0...", "rate": 20, "burst": 60, "concurrency": 200}
    {"name": "nightly", "sha256": "60303a...", "concurrency": 32, "priority": 10}

Empty lines, and those that begin with `#`, are skipped. The file has no key, only hashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from medialane.runtime.private_files import read_private
from medialane.types.errors import StartupFailed

SETTING = "--keys"

_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class TenantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the file. `sha256` are the SHA-256 hashes of the tenant's key, or keys, in hexadecimal.

    `rate` limits requests per second, in the mean; `burst` is how many may come at once (default: those of a second).
    `concurrency` limits requests in flight. None: unlimited. `priority` is the most urgent (lowest) that the tenant's
    requests may have; one that asks for less has what it asks for.
    """

    name: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    sha256: _Hash | Annotated[list[_Hash], msgspec.Meta(min_length=1)]
    rate: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    burst: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)] = 0

    @property
    def digests(self) -> list[bytes]:
        hashes = [self.sha256] if isinstance(self.sha256, str) else self.sha256
        return [bytes.fromhex(each) for each in hashes]

    @property
    def max_burst(self) -> float:
        return self.burst if self.burst is not None else max(1.0, self.rate or 1.0)


def read_keys(path: str) -> Mapping[bytes, TenantLimits]:
    """Return the tenants of a file by the digests of their keys. Raises StartupFailed naming line and field."""
    tenants: dict[bytes, TenantLimits] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(read_private(path, SETTING).splitlines(), 1):
        if not line.strip() or line.startswith(b"#"):
            continue
        try:
            limits = msgspec.json.decode(line, type=TenantLimits)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # names the field, and has no value of it
            raise _invalid(path, number, str(error)) from error
        if limits.burst is not None and limits.rate is None:
            raise _invalid(path, number, "burst needs a rate - at `$.burst`")
        if (other := lines.setdefault(limits.name, number)) != number:
            raise _invalid(path, number, f"line {other} has this name - at `$.name`")
        for digest in limits.digests:
            if (first := tenants.setdefault(digest, limits)) is not limits:
                raise _invalid(path, number, f"line {lines[first.name]} has this key - at `$.sha256`")
    if not tenants:
        raise StartupFailed(f"{SETTING} {path} has no key")
    return tenants


def _invalid(path: str, number: int, reason: str) -> StartupFailed:
    return StartupFailed(f"{SETTING} {path}, line {number}: {reason}")
