"""Generates the table of vLLM's flags, for processes that check them without importing vLLM.

vLLM's own parser would report a wrong flag as well, but needs 10 s of CPU time until it can (imports, on two cores of
an x86-64 server; 24 to 36 s with other load), where `medialane serve MODEL -- --wrong-flag` takes 0.9 s with the table.
The front end's flags are also kept from workers, and secrets taken out of command lines, before vLLM is imported.

`python tests/vllm_flag_table.py > src/medialane/cluster/vllm_flags.json` writes it; a contract test fails if it is out
of date. Each spelling of a flag maps to the type of its value: `flag` (none), `int`, `float`, `size`
(8192, 8k, 8K), `size-or-auto`, `json`, `text` (not checked), `many` (one or more texts), `many-int`, or the list of its
choices. A `?` after a type: None and the empty string are also accepted. Then follow the bounds of a number, from
vLLM's configuration class: `float > 0 <= 1`. `frontend` are
the flags that only the HTTP server uses: of the parser's group of that name, without engine arguments.
`processor` are those from which `AsyncEngineArgs.create_model_config` makes what a processor is built from. `parsers`
are vLLM's own, by flag; plugins add others.
"""

from __future__ import annotations

import json
import sys
from argparse import Action, ArgumentTypeError
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from vllm import config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.version import __version__

from medialane.vllm_bridge.seams.arguments import FlexibleArgumentParser, make_arg_parser

FlagType = str | list[str]

#: The group of vLLM's parser with the flags of its API server.
_FRONTEND = "Frontend"
#: The groups that `create_model_config` reads.
PROCESSOR_GROUPS = ("ModelConfig", "MultiModalConfig")


def flag_table() -> dict[str, Any]:
    """Return the installed vLLM's version, flags and parsers."""
    flags: dict[str, FlagType] = {}
    frontend: list[str] = []
    processor: list[str] = []
    engine = {field.name for field in fields(AsyncEngineArgs)}
    parser = make_arg_parser(FlexibleArgumentParser())
    for action in parser._actions:  # noqa: SLF001 - argparse has no public interface for that
        flag_type = _type_of(action)
        if isinstance(flag_type, str):
            flag_type = " ".join([flag_type, *_bounds(action)])
        flags |= dict.fromkeys(action.option_strings, flag_type)
        if _group(action) == _FRONTEND and action.dest not in engine:
            frontend += action.option_strings
        if _group(action) in PROCESSOR_GROUPS:
            processor += action.option_strings
    parsers = {
        "--tool-call-parser": sorted(ToolParserManager.list_registered()),
        "--reasoning-parser": sorted(ReasoningParserManager.list_registered()),
    }
    return {
        "version": __version__.partition("+")[0],
        "flags": dict(sorted(flags.items())),
        "frontend": sorted(frontend),
        "processor": sorted(processor),
        "parsers": parsers,
    }


def _group(action: Any) -> str | None:
    title: str | None = action.container.title
    return title


def _type_of(action: Action) -> FlagType:
    if action.nargs == 0:
        return "flag"
    if action.nargs == "+":
        return "many" if _accepts(action, "nonsense") else f"many-int{'?' if _accepts(action, 'None') else ''}"
    if action.nargs is not None:
        return "text"
    if action.choices:
        return sorted(map(str, action.choices))
    if _accepts(action, "nonsense"):
        return "text"
    if _accepts(action, "{}") or _accepts(action, "[]"):
        return "json"
    if not _accepts(action, "1"):
        return "text"
    flag_type = "float" if _accepts(action, "1.5") else "int"
    if _accepts(action, "1k"):
        flag_type = "size-or-auto" if _accepts(action, "auto") else "size"
    return f"{flag_type}?" if _accepts(action, "None") else flag_type


def _bounds(action: Any) -> Iterator[str]:
    """Yield operators and limits of the number that a flag sets. vLLM names a group of flags after their configuration
    class, which may have the field in a member."""
    direct = fields(getattr(config, str(_group(action)), config.VllmConfig))
    members = (fields(member.type) for member in direct if isinstance(member.type, type) and is_dataclass(member.type))
    for field in (*direct, *chain.from_iterable(members)):
        metadata = field.default.metadata if isinstance(field.default, FieldInfo) else ()
        for bound in metadata if field.name == action.dest else ():
            match bound:
                case Gt(limit):
                    yield from (">", str(limit))
                case Ge(limit):
                    yield from (">=", str(limit))
                case Lt(limit):
                    yield from ("<", str(limit))
                case Le(limit):
                    yield from ("<=", str(limit))


def _accepts(action: Action, text: str) -> bool:
    if not callable(action.type):
        return True
    try:
        action.type(text)
    except (ArgumentTypeError, TypeError, ValueError):
        return False
    return True


if __name__ == "__main__":
    sys.stdout.write(json.dumps(flag_table()).replace(', "--', ',\n"--') + "\n")  # a line for each flag
