"""Sizes in messages."""

GIB, MIB = 1 << 30, 1 << 20


def format_bytes(num_bytes: int) -> str:
    """Return a size as people read it: 1.5 GiB, 300 MiB, 3.0 MiB."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / MIB:.0f} MiB" if num_bytes >= 10 * MIB else f"{num_bytes / MIB:.1f} MiB"
