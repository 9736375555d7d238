"""Generates the table of vLLM's flags, for processes that check them without importing vLLM, which takes seconds.

`python -m medialane.vllm_bridge.flag_table > src/medialane/cluster/vllm_flags.json` writes it; a contract test fails
if it is out of date. Each spelling of a flag maps to the kind of its value: `flag` (none), `int`, `float`, `json`,
`many` (one or more), `text` (not checked), or the list of its choices. A `?` after a kind: None and the empty string
are also accepted. `parsers` are vLLM's own, by flag; plugins add others.
"""

from __future__ import annotations

import json
import sys
from argparse import Action, ArgumentTypeError
from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.version import __version__

from medialane.vllm_bridge.seams.arguments import FlexibleArgumentParser, make_arg_parser, parser_actions

Kind = str | list[str]


def flag_table() -> dict[str, Any]:
    """Return the installed vLLM's version, flags and parsers."""
    actions = parser_actions(make_arg_parser(FlexibleArgumentParser()))
    flags = {spelling: _kind(action) for action in actions for spelling in action.option_strings}
    parsers = {
        "--tool-call-parser": sorted(ToolParserManager.list_registered()),
        "--reasoning-parser": sorted(ReasoningParserManager.list_registered()),
    }
    return {"version": __version__.partition("+")[0], "flags": dict(sorted(flags.items())), "parsers": parsers}


def _kind(action: Action) -> Kind:
    if action.nargs == 0:
        return "flag"
    if action.nargs is not None:
        return "many" if action.nargs == "+" else "text"
    if action.choices:
        return sorted(map(str, action.choices))
    if _accepts(action, "nonsense"):
        return "text"
    if _accepts(action, "{}") or _accepts(action, "[]"):
        return "json"
    if not _accepts(action, "1"):
        return "text"
    kind = "float" if _accepts(action, "1.5") else "int"
    if _accepts(action, "1k"):
        return "text"  # 1k, 2M, auto
    return f"{kind}?" if _accepts(action, "None") else kind


def _accepts(action: Action, text: str) -> bool:
    if not callable(action.type):
        return True
    try:
        action.type(text)
    except (ArgumentTypeError, TypeError, ValueError):
        return False
    return True


if __name__ == "__main__":
    json.dump(flag_table(), sys.stdout, indent=0)
    sys.stdout.write("\n")
