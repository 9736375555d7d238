"""The command `medialane` with a store that overwrites what it frees (tests/poison.py): python PATH/medialane serve."""

import sys
from dataclasses import replace
from pathlib import Path

from medialane.cli import main
from medialane.cluster import local

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[3]))
    import poison

    if sys.argv[1] in ("warm", "store"):
        poison.install()
    specs = local.process_specs
    local.process_specs = lambda *arguments, **settings: [
        replace(spec, argv=poison.poisoned_store(spec.argv)) for spec in specs(*arguments, **settings)
    ]
    sys.exit(main())
