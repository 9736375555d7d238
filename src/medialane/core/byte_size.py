"""Sizes in messages."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: float) -> str:
    """Return a size as people read it, with at most one decimal place: 1.5 GiB, 300 MiB, 64 KiB."""
    exponent = 0
    while num_bytes >= 1024 and exponent < len(_UNITS) - 1:
        num_bytes, exponent = num_bytes / 1024, exponent + 1
    return f"{num_bytes:.1f}".removesuffix(".0") + f" {_UNITS[exponent]}"
