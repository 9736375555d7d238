"""The command `medialane`, but its store overwrites what it frees (tests/poison.py): `python PATH/medialane serve ...`.

The folder has this name because tests find processes by their command lines.
"""

import sys
from pathlib import Path

from medialane.cli.main import main
from medialane.cluster import local

FOLDER = Path(__file__).parent


def poisoned_store(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command line of a process of `serve`, by this program if it is the store."""
    return (argv[0], str(FOLDER), *argv[3:]) if argv[3] == "store" else argv


if __name__ == "__main__":
    if sys.argv[1] == "store":
        sys.path.append(str(FOLDER.parents[2]))
        from poison import install

        install()
    command = local._command
    local._command = lambda *arguments: poisoned_store(command(*arguments))
    sys.exit(main())
