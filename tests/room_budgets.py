"""Prints lines and files of each room of src/medialane beside its budget: `python tests/room_budgets.py`.

Fails if a room exceeds its budget. Whoever needs more raises the number in the same commit, and says there what was
deleted instead, or why nothing could be.
"""

import sys
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "medialane"

#: Lines and files.
BUDGETS = {
    "types": (3050, 12),
    "runtime": (1900, 9),
    "observability": (1450, 6),
    "config": (900, 4),
    "wire": (2550, 11),
    "media": (4500, 18),
    "arena": (2650, 12),
    "prepare": (3450, 14),
    "transfer": (2400, 11),
    "store": (4100, 13),
    "routing": (2100, 9),
    "gateway": (15720, 55),
    "worker": (2700, 11),
    "vllm_bridge": (13590, 60),
    "cluster": (3650, 13),
    "cli": (5150, 22),
    "tools": (3850, 20),
    "client": (350, 3),
    "testing": (2150, 10),
}


def sizes() -> dict[str, tuple[int, int]]:
    """Return lines and files by room."""
    found: dict[str, tuple[int, int]] = {}
    for path in SRC.rglob("*.py"):
        room, *rest = path.relative_to(SRC).parts
        if rest:
            lines, files = found.get(room, (0, 0))
            found[room] = (lines + len(path.read_text().splitlines()), files + 1)
    return found


def table() -> tuple[str, bool]:
    """Return a line for each room, and whether any exceeds its budget."""
    found, rows, is_any_above = sizes(), list[str](), False
    for room, (lines, files) in sorted(found.items(), key=lambda row: -row[1][0]):
        most_lines, most_files = BUDGETS.get(room, (0, 0))
        is_above = lines > most_lines or files > most_files
        is_any_above |= is_above
        mark = "  above its budget" if is_above else ""
        rows.append(f"{room:14}{lines:6} of {most_lines:6} lines {files:4} of {most_files:4} files{mark}\n")
    num_lines, num_files = (sum(column) for column in zip(*found.values(), strict=True))
    return f"{''.join(rows)}{'sum':14}{num_lines:6}{'lines':>16} {num_files:4}{'files':>14}\n", is_any_above


if __name__ == "__main__":
    text, is_above = table()
    sys.stdout.write(text)
    sys.exit(is_above)
