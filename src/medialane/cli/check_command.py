"""`medialane check`: the command line; `tools/check/` implements it."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from medialane.cli.doctor import model_findings, show_findings
from medialane.cli.serve import SECTIONS
from medialane.cli.settings import add_settings, given_settings
from medialane.cluster.placement import find_hardware
from medialane.cluster.preflight import check_start
from medialane.cluster.vllm_flags import has_flag
from medialane.config import Config, as_environ, foreign_environ, load_config, process_environ, vllm_defaults
from medialane.gateway import metrics_key
from medialane.runtime.stop import stopped_by_signals
from medialane.runtime.tasks import first_of
from medialane.tools.check.kinds import case_names
from medialane.tools.check.media import items_named
from medialane.tools.check.results import CheckReport, encode, show
from medialane.tools.check.run import run_check
from medialane.tools.check.servers import CheckProgress, CheckSetup
from medialane.tools.check.tensors import TensorReport, compare_tensors, show_tensors
from medialane.types.errors import StartupFailed

EXIT_INTERRUPTED = 130

T = TypeVar("T")

_COMMON = ("stage", "transport", "preparers", "arena-size", "encode-cache", "start-timeout", "log-level")

#: Settings of `medialane serve` with which each prompt is computed by another worker than the answer's.
_SPLIT = {"prefill": "1", "decode": "1", "prefill-at": "prefill"}

_EPILOG = """\
Starts plain vLLM, sends it a matrix of requests, stops it; then the same with `medialane serve` and one worker. The
matrix fits the model: the endpoints that plain vLLM has for it (chat, transcription, translation, embeddings, scores);
each modality that it accepts alone, several times and mixed; small, odd, large, long, damaged and too many items; the
same item again; documents (PDF), of which plain vLLM is sent each page's text and image; processor options; streams;
several choices. Media are generated, nothing is downloaded but the model. Sampling is greedy, so token ids, text,
logprobs, usage and status must be equal.

The table says of each case:
  equal     every token id and every logprob
  close     as equal, but logprobs differ by up to --tolerance
  refused   both refuse the request, with the same status, or medialane refuses what plain vLLM fails at (5xx, or
            its engine ends: then it is started again)
  answered  medialane answers what plain vLLM refuses or fails at
  skipped   an option that plain vLLM ignores for this model, and medialane refuses
  differs   anything else: please report it, with the JSON
and how medialane served it: stage (what the worker was sent), transport, and whether the media were cached. What
`medialane doctor MODEL` says of the model follows.

With --tensors no server is started and no weights are loaded: images of several shapes and modes, videos and audio are
processed by plain vLLM, by medialane (what its engine is given) and by Hugging Face's AutoProcessor (what a trainer
computes), and their tensors compared, field by field, with plain vLLM's. Hugging Face's gets the frames and samples
that vLLM has chosen, so sampling is not compared. The table says of each field:
  equal                       dtype, shape and every bit (but for a batch dimension of 1)
  equal in vLLM's dtype       the same numbers, when rounded to it
  equal after normalisation   vLLM's are raw uint8 pixels, which its engine normalises
  differs                     and by how much at most
  another shape, missing      or only one of them has the field
What Hugging Face's processor does otherwise is a finding, not a failure: the exit status is 1 if medialane's differ.

Exit status: 0 all is equal; 1 an answer differs, or there was none; 2 an argument is wrong, or a server did not start;
130 interrupted (Ctrl-C: the servers are stopped, by a second one killed).

examples:
  medialane check Qwen/Qwen2.5-VL-3B-Instruct
  medialane check ./model --json report.json -- --max-model-len 8192 --limit-mm-per-prompt '{"image": 4}'
  medialane check ./model --only video --only audio      # some cases
  medialane check ./model --tensors      # what a trainer needs to know of the pixels
  medialane check ./model --stage decoded                # any setting of `medialane serve`
  medialane check ./model --prefill-decode               # two engines beside each other, and KV blocks between them
  medialane check ./model --at-once -- --gpu-memory-utilization 0.45    # saves time where both fit"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on a model hub")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="only cases with WORD in their name; repeatable"
    )
    parser.add_argument("--quick", action="store_true", help="a third of the matrix: the cases that find most")
    parser.add_argument(
        "--tensors",
        action="store_true",
        help="compare the tensors of items instead, also with Hugging Face's processor; needs no weights and no GPU",
    )
    parser.add_argument(
        "--at-once", action="store_true", help="run both servers at the same time: twice the memory, half the time"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="accept logprobs that differ by up to X where all token ids are equal (default 0)",
    )
    parser.add_argument(
        "--prefill-decode",
        action="store_true",
        help="one worker computes all prompts, and another one continues them (--prefill 1 --decode 1)",
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the servers' logs in this folder")
    add_settings(parser, SECTIONS, common=_COMMON)


def run(args: argparse.Namespace) -> int:
    """Check the model; 0 if no answer differs from plain vLLM's, 1 if one does. Raises StartupFailed."""
    given = given_settings(args) | (_SPLIT if args.prefill_decode else {})
    config = load_config(given, file=args.config, sections=SECTIONS)
    _check(args, config)
    check_start(args.model, args.vllm_args, process_environ())
    with logs_folder(args.logs) as logs:
        setup = _setup(args, config, logs)
        report = until_signal(_report(setup, tensors=args.tensors))
    if report is None:
        print("interrupted: all servers are stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    if args.json is not None:
        args.json.write_bytes(encode(report))
    if isinstance(report, TensorReport):
        show_tensors(report, Console())
    else:
        show(report, Console())
        show_findings([*model_findings(args.model, args.vllm_args)])
    return 0 if report.passed else 1


def _check(args: argparse.Namespace, config: Config) -> None:
    """Raise StartupFailed for arguments with which the servers would start in vain."""
    if args.json is not None and not args.json.parent.is_dir():
        raise StartupFailed(f"--json {args.json}: there is no folder {args.json.parent}")
    if not args.tolerance >= 0:
        raise StartupFailed("--tolerance must not be negative")
    if args.tensors and (args.quick or args.at_once or args.tolerance or args.prefill_decode):
        raise StartupFailed(
            "--tensors starts no server: leave out --quick, --at-once, --tolerance and --prefill-decode"
        )
    if has_flag(args.vllm_args, "--disable-fastapi-docs"):
        raise StartupFailed("the check asks plain vLLM for its routes: leave out --disable-fastapi-docs")
    _check_words(args.only, tensors=args.tensors)
    check_launch(args, config)


def _check_words(words: Sequence[str], *, tensors: bool) -> None:
    """Raise StartupFailed for a word that is in no case's (or item's) name, whatever the model accepts."""
    names = [name for _, name, _ in items_named(())] if tensors else [*case_names()]
    for word in words:
        if not any(word in name for name in names):
            examples = "image, video, audio, 'two of', streaming, damaged, text"
            examples = "image, video, audio, grey, EXIF" if tensors else examples
            raise StartupFailed(f"--only {word}: no case has that in its name; words that some have: {examples}")


def _setup(args: argparse.Namespace, config: Config, logs: Path) -> CheckSetup:
    return CheckSetup(
        **launch_settings(args, config, logs, num_workers=len(config.cluster.roles) + args.at_once),
        only=args.only,
        essential=args.quick,
        at_once=args.at_once,
        tolerance=args.tolerance,
    )


async def _report(setup: CheckSetup, *, tensors: bool) -> CheckReport | TensorReport:
    with closing(CheckProgress(Console(stderr=True, highlight=False))) as progress:
        return await compare_tensors(setup, progress) if tensors else await run_check(setup, progress)


def check_launch(args: argparse.Namespace, config: Config) -> None:
    """Raise StartupFailed for arguments with which the servers would start in vain."""
    if has_flag(args.vllm_args, "--ssl-keyfile", "--ssl-certfile", "--uds", "--root-path"):
        raise StartupFailed("both servers are asked by HTTP: leave out --ssl-..., --uds and --root-path")
    if not given_settings(args).keys().isdisjoint(("host", "port")):
        raise StartupFailed("both servers get free ports of 127.0.0.1: leave out --host and --port")
    if config.cluster.ray or config.cluster.num_workers == 0:
        raise StartupFailed("both servers run on this host: leave out --ray and --workers 0")


def launch_settings(args: argparse.Namespace, config: Config, logs: Path, *, num_workers: int = 1) -> dict[str, Any]:
    """Return the fields of `Launch`. `num_workers` is how many engines share the machine."""
    environ = process_environ()
    on_gpu = bool(find_hardware(environ).gpus)
    defaults = vllm_defaults(args.model, args.vllm_args, on_gpu=on_gpu, num_workers=num_workers)
    # One key, which the client sends to both.
    key = {"VLLM_API_KEY": config.gateway.api_keys[0]} if config.gateway.api_keys else {}
    return {
        "model": args.model,
        "vllm_args": args.vllm_args,
        "environ": defaults | foreign_environ(environ) | key,
        # What the flags and the file of settings say wins in the server as it does here. A comparison is no traffic.
        "own_environ": defaults | environ | as_environ(config) | {"MEDIALANE_RECORD": ""},
        "metrics_key": metrics_key(config.gateway),
        "logs": logs,
        "start_s": config.cluster.start_timeout_s,
    }


@contextmanager
def logs_folder(chosen: Path | None) -> Iterator[Path]:
    """Yield the folder for the logs: the user's, or one that is removed. Raises StartupFailed."""
    if chosen is not None:
        try:
            chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StartupFailed(f"--logs {chosen}: {error.strerror}") from error
        yield chosen
        return
    with tempfile.TemporaryDirectory(prefix="medialane-logs-") as folder:
        yield Path(folder)


def until_signal(work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work`; None if a signal ends it. Its servers are stopped then, by a second signal killed."""

    async def run() -> T | None:
        with stopped_by_signals(signal.SIGHUP) as stop:
            task = asyncio.create_task(work)
            await first_of(asyncio.wait((task,)), stop.asked.wait())
            if stop.asked.is_set():
                print("stopping the servers; a second signal kills them", file=sys.stderr, flush=True)
                task.cancel()
                await first_of(asyncio.wait((task,)), stop.at_once.wait())
                task.cancel()
                await asyncio.wait((task,))
        return None if task.cancelled() else task.result()

    return asyncio.run(run())
