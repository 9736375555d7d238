"""Validation of the numbers in settings."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from medialane.core.errors import StartupFailed


def check_numbers(config: msgspec.Struct, *, may_be_zero: Collection[str] = ()) -> None:
    """Raise StartupFailed naming the first negative number among the settings, or zero if not in `may_be_zero`."""
    for name, value in msgspec.structs.asdict(config).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
            if name not in may_be_zero:
                raise StartupFailed(f"{name} must be positive")
            if value != 0:
                raise StartupFailed(f"{name} must not be negative")
