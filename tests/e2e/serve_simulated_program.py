"""`medialane serve` with a simulated worker and a store that overwrites what it frees:
`python serve_simulated_program.py ARGUMENTS`.

Everything else is as the command starts it. vLLM's engine would take a minute of both cores.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from medialane.cli import main
from medialane.cluster import INTERPRETER, ProcessSpec, local

sys.path.append(str(Path(__file__).parents[1]))

from poison import poisoned_store

SIMULATED = ("--engine", "simulated", "--simulated-step-ms", "50", "--simulated-prefill-token-ms", "0")

_parts = local.process_specs


def parts(*args: Any, **settings: Any) -> list[ProcessSpec]:
    return [
        replace(part, argv=(*part.argv[: part.argv.index("--")], *SIMULATED))
        if part.argv[len(INTERPRETER)] == "worker"
        else replace(part, argv=poisoned_store(part.argv))
        for part in _parts(*args, **settings)
    ]


if __name__ == "__main__":
    local.process_specs = parts
    sys.exit(main(["serve", *sys.argv[1:]]))
