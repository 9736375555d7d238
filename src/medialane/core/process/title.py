"""The title of this process: what `ps` and `top` show instead of the interpreter's command line.

A title is written over the arguments and the environment with which the process was executed, so /proc/PID/environ is
overwritten as well; os.environ is not affected. A fork has its parent's title until it sets its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import setproctitle

#: The process that others are forked from.
WARM: Final = "warm"


def reserve_title() -> None:
    """Find the memory of the title. To be called before the environment is changed: it is not found afterwards, and
    the process keeps its command line."""
    setproctitle.getproctitle()


def set_title(name: str, argv: Iterable[str] = ()) -> None:
    """Show this process as `medialane NAME`, followed by arguments, which must have no secrets.

    What does not fit into the command line and environment with which the process was executed is cut off.
    """
    setproctitle.setproctitle(" ".join(["medialane", name, *argv]))


def has_title(pid: int, name: str) -> bool:
    """Return whether a process has this title. Its arguments are not compared."""
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            title = file.read()
    except OSError:
        return False  # it has exited
    return title.rstrip("\0") == f"medialane {name}" or title.startswith(f"medialane {name} ")
