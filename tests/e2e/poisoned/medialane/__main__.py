"""The command `medialane` with a store that overwrites what it frees (tests/poison.py): python PATH/medialane serve."""

import sys
from pathlib import Path

from medialane.cli.main import main
from medialane.cluster import local

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[3]))
    import poison

    if sys.argv[1] == "store":
        poison.install()
    command = local._command
    local._command = lambda *arguments: poison.poisoned_store(command(*arguments))
    sys.exit(main())
