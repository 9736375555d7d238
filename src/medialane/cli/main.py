"""The command `medialane`: dispatches to a subcommand and imports only its module.

A subcommand is a module with `add_arguments(parser)` and `run(args) -> int`. Arguments after a lone `--` are vLLM's and
are passed as `args.vllm_args`, secrets excepted; the others as `args.argv`. This module imports nothing but the
standard library: it reports which package is missing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from medialane import __version__

#: Prefix of the error line of a failed start-up; the supervisor searches for it in the logs of its processes.
ERROR_PREFIX = "medialane: error: "
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
#: Commands whose processes have no secrets, and forks that others are to read.
_READABLE = ("warm", "doctor", "bench")


class Command(NamedTuple):
    """`usage` follows the command's name; it is set only for commands that accept vLLM's flags. One without `help` is
    not for people."""

    module: str
    help: str
    usage: str | None = None

    @property
    def takes_vllm_args(self) -> bool:
        return self.usage is not None


_VLLM = "[settings] [-- any flag of vLLM's engine or server]"

COMMANDS = {
    "serve": Command("serve", "media store, gateway and vLLM workers on this host", f"[MODEL] {_VLLM}"),
    "render": Command(
        "render", "tokens, placeholders and hashes of requests, as plain vLLM has them: no workers", f"MODEL {_VLLM}"
    ),
    "gateway": Command(
        "gateway_command",
        "a gateway for workers that are started separately",
        f"MODEL --store ADDRESS|none --worker ADDRESS [...] | --join-listen ADDRESS {_VLLM}",
    ),
    "store": Command("store", "the media store of one host", f"MODEL --listen ADDRESS {_VLLM}"),
    "worker": Command(
        "worker_command", "a single vLLM worker", f"MODEL --listen ADDRESS | --join HOST:PORT[,...] {_VLLM}"
    ),
    "warm": Command("warm", "", "MODEL"),  # of `medialane serve`
    "name-router": Command("name_router", "", "FILE"),  # the same
    "demo": Command("demo", "run photos through gateway and workers with a tiny model, and compare with plain vLLM"),
    "check": Command(
        "check_command", "compare a model's answers with plain vLLM's, over a matrix of requests", f"MODEL {_VLLM}"
    ),
    "compare": Command(
        "compare_command",
        "replay traffic against plain vLLM and medialane, and compare them",
        f"MODEL --requests FILE {_VLLM}",
    ),
    "bench": Command("bench", "run a benchmark"),
    "certs": Command("certs", "make the TLS certificates of several hosts"),
    "status": Command("status", "what a running gateway is connected to: hosts, workers, store, health"),
    "workers": Command("workers", "list and drain the workers of running gateways"),
    "reload": Command("settings", "have running gateways read keys, certificates and log level again"),
    "doctor": Command("doctor", "check this machine, or where the time of a request goes", f"[MODEL] {_VLLM}"),
}

_EPILOG = """\
examples:
  medialane serve Qwen/Qwen2.5-VL-3B-Instruct --workers 2
  medialane serve ./model --workers 2 --arena-size 4GiB -- --max-model-len 8192
  medialane check ./model
  medialane doctor

`medialane COMMAND --help` describes each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `argv`, by default of this process, which is changed for it, and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in COMMANDS:
        _top_parser().parse_args(words[:1] or ["--help"])  # exits: prints the help, the version or the error
        return _EXIT_USAGE
    try:
        from medialane.runtime.linux import reserve_title

        reserve_title()
        if argv is None:
            _isolate(words[0])
        return _run(*words)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "medialane") or importlib.util.find_spec(package) is not None:
            raise
        return _failed(
            f"`medialane {words[0]}` needs the package {package}, which is not installed: {_remedy(package)}"
        )
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def _isolate(name: str) -> None:
    from medialane.runtime.linux import hide_memory, import_nothing_from_here

    if name != "bench":  # whose programs import from the folder that they are in
        import_nothing_from_here()
    if name not in _READABLE:
        hide_memory()


def _run(name: str, *words: str) -> int:
    from medialane.runtime.linux import refuse_library_settings
    from medialane.types.errors import StartupFailed

    command = COMMANDS[name]
    try:
        if command.takes_vllm_args:
            refuse_library_settings()
        module = importlib.import_module(f"medialane.cli.{command.module}")
        return int(module.run(parse_words(name, command, module.add_arguments, list(words))))
    except StartupFailed as error:
        return _failed(error.message)


def _failed(message: str) -> int:
    print(ERROR_PREFIX + message, file=sys.stderr, flush=True)
    return _EXIT_USAGE


def _remedy(package: str) -> str:
    """Not a command for pip: it would look up our name on an index, where it is not ours."""
    if package in ("vllm", "torch", "transformers", "openai"):
        return "install medialane with the extra vllm (GPU) or cpu (see README.md)"
    if package in ("ray", "nixl"):
        return f"install medialane with the extra {package}"
    return "install medialane with its dependencies (see README.md)"


def _top_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medialane",
        description="Decode once, route to the cache, hand over without copying: a multimodal gateway for vLLM.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"medialane {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        if command.help:
            commands.add_parser(name, help=command.help)
    return parser


def parse_words(
    name: str, command: Command, add_arguments: Callable[[argparse.ArgumentParser], None], words: list[str]
) -> argparse.Namespace:
    ours, vllm_args = _split(words)
    parser = argparse.ArgumentParser(
        prog=f"medialane {name}",
        usage=f"medialane {name} {command.usage}" if command.usage else None,
        description=command.help and f"{command.help[0].upper()}{command.help[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    vllm_args, secret_flags = _hide_secrets(vllm_args)
    parser.set_defaults(argv=ours, vllm_args=vllm_args, secret_flags=secret_flags)
    add_arguments(parser)
    args, unknown = parser.parse_known_args(ours)
    if unknown:
        hint = "\nvLLM's own flags go after a lone `--`" if command.takes_vllm_args else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(parser, unknown, command)}{hint}")
    if vllm_args and not command.takes_vllm_args:
        parser.error("this command takes no vLLM flags: nothing may follow `--`")
    return args


def _meant(parser: argparse.ArgumentParser, unknown: list[str], command: Command) -> str:
    """Return a question with the flags that look most like the `unknown` ones, unless these are vLLM's."""
    import difflib

    from medialane.cluster.vllm_flags import flag_table

    flags = parser._option_string_actions  # noqa: SLF001 - argparse has no list of its flags
    theirs = flag_table()["flags"] if command.takes_vllm_args else ()
    spelled = [word.partition("=")[0].replace("_", "-").lower() for word in unknown if word.startswith("--")]
    found = [difflib.get_close_matches(word, flags, n=1, cutoff=0.7) for word in spelled if word not in theirs]
    close = dict.fromkeys(flag for matches in found for flag in matches)
    return f": did you mean {' '.join(close)}?" if close else ""


def _hide_secrets(vllm_args: list[str]) -> tuple[list[str], list[str]]:
    """Return vLLM's flags, with its `--config` file's, without flags that have a secret as value: the secret
    becomes a variable of this process, from which only processes that need it inherit it. Also return the flags with
    secrets that are in this process's command line. Raises StartupFailed."""
    if not vllm_args:
        return [], []
    from medialane.cluster.vllm_flags import API_KEY, HF_TOKEN, take_secrets, with_config_file
    from medialane.config import set_secrets  # imported lazily: they take longer than a help text should

    rest, secrets = take_secrets(with_config_file(vllm_args))
    variables = {}
    if API_KEY in secrets:
        variables["MEDIALANE_API_KEYS"] = json.dumps(secrets[API_KEY])
    if HF_TOKEN in secrets:
        variables["HF_TOKEN"] = secrets[HF_TOKEN][0]
    set_secrets(variables)
    return rest, list(take_secrets(vllm_args)[1])


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in words:
        return words, []
    position = words.index("--")
    return words[:position], words[position + 1 :]
