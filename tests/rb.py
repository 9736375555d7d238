"""Prints lines and files of each room of src/medialane beside its budget: `python tests/room_budgets.py`.

Fails if a room exceeds its budget. Whoever needs more raises the number in the same commit, and says there what was
deleted instead, or why nothing could be.
"""

import sys
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "medialane"

#: Lines and files.
BUDGETS = {
    "types": (3000, 18),
    "runtime": (1900, 14),
    "observability": (1650, 7),
    "config": (950, 6),
    "wire": (2650, 19),
    "media": (4100, 22),
    "arena": (2800, 17),
    "prepare": (3600, 22),
    "transfer": (2500, 18),
    "store": (4150, 20),
    "routing": (2150, 14),
    "gateway": (16000, 101),
    "worker": (2950, 22),
    "vllm_bridge": (13450, 105),
    "cluster": (3750, 23),
    "cli": (5400, 34),
    "tools": (4000, 28),
    "client": (310, 4),
    "testing": (2300, 15),
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


def main() -> int:
    found = sizes()
    above = False
    for room, (lines, files) in sorted(found.items(), key=lambda row: -row[1][0]):
        most_lines, most_files = BUDGETS.get(room, (0, 0))
        is_above = lines > most_lines or files > most_files
        above |= is_above
        mark = "  above its budget" if is_above else ""
        print(f"{room:14}{lines:6} of {most_lines:6} lines {files:4} of {most_files:4} files{mark}")
    print(f"{'sum':14}{sum(n for n, _ in found.values()):6} lines {sum(n for _, n in found.values()):4} files")
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
