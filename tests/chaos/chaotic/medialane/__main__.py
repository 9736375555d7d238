"""The command `medialane` for chaos: `python PATH/medialane serve ...`.

* The store overwrites what it frees (tests/poison.py).
* Images of certain sizes crash or hang their preparer, or exhaust its memory (tests/breaking_processor.py).
* With CHAOS_ENGINE=simulated, workers are simulated. Their tokens follow from the bytes of the media, too, which are
  read again for each token, as a real engine may read them at any time.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from medialane.cli import main
from medialane.cluster import INTERPRETER, ProcessSpec, local

TESTS = Path(__file__).parents[3]
SIMULATED = ("--engine", "simulated", "--simulated-step-ms", "20", "--simulated-prefill-token-ms", "0.01")
OURS = ("warm", "store", "worker")


def chaotic(spec: ProcessSpec) -> ProcessSpec:
    """As in all command lines, as many words as INTERPRETER has come before the command."""
    command = spec.argv[len(INTERPRETER) :]
    if command[0] == "worker" and os.environ.get("CHAOS_ENGINE") == "simulated":
        command = (*command[: command.index("--")], *SIMULATED)
    interpreter = (sys.executable, "-P", "-u", str(Path(__file__).parent)) if command[0] in OURS else INTERPRETER
    return replace(spec, argv=(*interpreter, *command))


def patch() -> None:
    sys.path += [str(TESTS), str(TESTS / "chaos")]
    from reading_engine import ReadingEngine

    import poison
    from medialane.cli import store
    from medialane.testing.simulated import engine

    poison.install()
    store.PROCESSOR_FACTORY = "breaking_processor:build_processor"
    engine.SimulatedEngine = ReadingEngine


if __name__ == "__main__":
    if sys.argv[1] in OURS:
        patch()
    specs = local.process_specs
    local.process_specs = lambda *arguments, **settings: list(map(chaotic, specs(*arguments, **settings)))
    sys.exit(main())
