"""Parses the vLLM flags that matter before vLLM is loaded, as vLLM's parser would: a few values, and which flags are
for which process."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from medialane.types.errors import StartupFailed

API_KEY, HF_TOKEN = "--api-key", "--hf-token"
#: Flags whose values are secrets. `take_secrets` removes them.
SECRET_FLAGS = (API_KEY, HF_TOKEN)
#: Flags of connectors, loaders and exporters, whose values may have passwords. No processor depends on them.
_MAY_HAVE_PASSWORDS = (
    "--kv-transfer-config", "--ec-transfer-config", "--kv-events-config", "--weight-transfer-config",
    "--model-loader-extra-config", "--additional-config",
)  # fmt: skip
TRACES_ENDPOINT = "--otlp-traces-endpoint"
#: Flags about vLLM's own spans, which are made in workers.
_TRACES = (TRACES_ENDPOINT, "--collect-detailed-traces")
#: Of vLLM's HTTP server that terminates TLS.
TLS_FLAGS = ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers")
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


@cache
def flag_table() -> Mapping[str, Any]:
    """Return the table of vLLM's flags (`tests/vllm_flag_table.py` makes it)."""
    table: dict[str, Any] = json.loads(files("medialane.cluster").joinpath("vllm_flags.json").read_bytes())
    return table


def with_config_file(vllm_args: Sequence[str]) -> list[str]:
    """Return the flags with the flags of `--config FILE` in its place, before all others, so that each process
    gets its share of them. Raises StartupFailed."""
    args = list(vllm_args)
    if "--config" not in args:
        return args
    position = args.index("--config")
    path = Path(args[position + 1]) if position + 1 < len(args) else None
    if path is None or not path.is_file():
        raise StartupFailed(f"vLLM flags after `--`: --config {path or ''}: there is no such file")
    import yaml  # type: ignore[import-untyped]  # comes with vLLM

    try:
        flags = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StartupFailed(f"vLLM flags after `--`: --config {path}: it cannot be read as YAML") from error
    if not isinstance(flags, dict):
        raise StartupFailed(f"vLLM flags after `--`: --config {path}: it must map names of flags to values")
    return [*(word for name, value in flags.items() for word in _words(name, value)), *_without(args, position)]


def _without(args: list[str], position: int) -> list[str]:
    return [*args[:position], *args[position + 2 :]]


def _words(name: str, value: object) -> list[str]:
    """Return the words of a setting of the file, as vLLM does (`FlexibleArgumentParser.load_config_file`)."""
    match value:
        case True:
            return [f"--{name}"]
        case False:
            return [f"--no-{name}"] if f"--no-{name}" in flag_table()["flags"] else []
        case []:
            return []
        case list():
            return [f"--{name}", *map(str, value)]
        case dict():
            return [f"--{name}", json.dumps(value)]
        case _:
            return [f"--{name}", str(value)]


def grouped(vllm_args: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag's full name with its words: itself as it is spelled, then its values."""
    group: list[str] = []
    for word in vllm_args:
        if group and _is_flag(word):
            yield _full_name(group[0]), group
            group = []
        group.append(word)
    if group:
        yield _full_name(group[0]), group


def _values(words: list[str]) -> list[str]:
    """Return the values of a flag, of its words."""
    _, equals, value = words[0].partition("=")
    return [*([value] if equals else []), *words[1:]]


def _is_flag(word: str) -> bool:
    """As argparse: not a negative number, not a text that begins with a dash, nor a dash alone."""
    return (
        word.startswith("-") and word != "-" and _NUMBER.fullmatch(word) is None and " " not in word.partition("=")[0]
    )


def _full_name(word: str) -> str:
    """Return the name of the flag that a word spells: `--api_key=x`, `--api-k`; an ambiguous or unknown one is
    returned as it is."""
    name = word.partition("=")[0]
    if not name.startswith("--"):
        return name
    name = name.partition(".")[0].replace("_", "-")
    known = flag_table()["flags"]
    matches = [name] if name in known else [flag for flag in known if flag.startswith(name)]
    return matches[0] if len(matches) == 1 else name


def engine_flags(vllm_args: Sequence[str]) -> list[str]:
    """Return the flags that not only a gateway uses."""
    frontend = flag_table()["frontend"]
    return [word for name, words in grouped(vllm_args) if name not in frontend for word in words]


def processor_flags(vllm_args: Sequence[str]) -> list[str]:
    """Return the flags that the model's processor depends on, and flags that the table does not know. No secret is
    among them, and no `--hf-token` without a value, for which the hub's library would read one from a file."""
    table = flag_table()
    return [
        word
        for name, words in grouped(vllm_args)
        if name not in SECRET_FLAGS and (name in table["processor"] or name not in table["flags"])
        for word in words
    ]


def warm_flags(vllm_args: Sequence[str]) -> list[str]:
    """Return the flags of the warm process, in whose forks hostile media are decoded: without flags that may have
    passwords, and without those about traces, which the one may have. Gateways with another such flag build their front
    end themselves."""
    return without_flags(vllm_args, (*_MAY_HAVE_PASSWORDS, *_TRACES))


def untraced_flags(vllm_args: Sequence[str]) -> list[str]:
    """Return the flags without those about vLLM's own spans."""
    return without_flags(vllm_args, _TRACES)


def without_flags(vllm_args: Sequence[str], names: Collection[str]) -> list[str]:
    return [word for name, words in grouped(vllm_args) if name not in names for word in words]


def take_secrets(vllm_args: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the flags without the ones that have a secret as value, and these values, by flag; the last one counts."""
    rest: list[str] = []
    taken: dict[str, list[str]] = {}
    for name, words in grouped(vllm_args):
        if name in SECRET_FLAGS and (values := _values(words)):
            taken[name] = values
        else:
            rest += words
    return rest, taken


def flag_value(vllm_args: Sequence[str], *names: str) -> str | None:
    """Return the last value of a flag with any of `names`; None if it is absent. As in vLLM's parser, `--a-b v`,
    `--a-b=v`, `--a_b v` and an abbreviation are the same."""
    last = None
    for name, words in grouped(vllm_args):
        if name in names and (values := _values(words)):
            last = values[0]
    return last


def flag_values(vllm_args: Sequence[str], name: str) -> list[str]:
    """Return all values of the last flag with this name."""
    return next((_values(words) for found, words in reversed([*grouped(vllm_args)]) if found == name), [])


def has_flag(vllm_args: Sequence[str], *names: str) -> bool:
    """Return whether a flag is present, with or without a value."""
    return any(name in names for name, _ in grouped(vllm_args))


def gpus_per_worker(vllm_args: Sequence[str]) -> int:
    """Return the number of GPUs of one engine. Raises StartupFailed for sizes that are not numbers."""
    size = _positive(vllm_args, "--tensor-parallel-size", "-tp") * _positive(
        vllm_args, "--pipeline-parallel-size", "-pp"
    )
    if has_flag(vllm_args, "--data-parallel-size-local", "-dpl"):
        return size * _positive(vllm_args, "--data-parallel-size-local", "-dpl")
    return size * _positive(vllm_args, "--data-parallel-size", "-dp")


def ranks_per_worker(vllm_args: Sequence[str]) -> int:
    """Return the number of data-parallel ranks of one engine. Raises StartupFailed if it is not a number."""
    return _positive(vllm_args, "--data-parallel-size", "-dp")


def _positive(vllm_args: Sequence[str], *names: str) -> int:
    value = flag_value(vllm_args, *names) or "1"
    if not value.isdigit() or int(value) < 1:
        raise StartupFailed(f"{names[0]} {value}: must be a whole number of at least 1")
    return int(value)
