"""`medialane compare`: the command line; `tools/compare/` implements it."""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from pathlib import Path

import msgspec
from rich.console import Console

from medialane.cli.check_command import EXIT_INTERRUPTED, check_launch, launch_settings, logs_folder, until_signal
from medialane.cli.serve import SECTIONS
from medialane.cli.settings import add_settings, given_settings
from medialane.cluster.preflight import check_start
from medialane.config import load_config, process_environ
from medialane.runtime.resources import machine
from medialane.tools.check.servers import CheckProgress, Launch
from medialane.tools.compare import (
    Pace,
    Slo,
    Traffic,
    TrafficComparison,
    make_report,
    read_traffic,
    show,
    sides_of,
    written,
)
from medialane.types.errors import StartupFailed

_COMMON = ("workers", "preparers", "arena-size", "stage", "transport", "start-timeout", "log-level")
_CONCURRENCY = 8
_SLO = Slo()

_EPILOG = f"""\
Replays the requests of a file against plain vLLM, then against `medialane serve`, each at its defaults and alone on
this machine, and compares them: answers, times, throughput, goodput, CPU, bytes copied, what was found in caches.
Prints a table; writes report.json, and each reply, to the folder --out.

FILE is a recording or an OpenAI batch file. `medialane serve MODEL --record FILE` records traffic;
docs/guides/compare.md has the ten minutes from there to here.

Requests are sent greedy and streamed (--as-sent: as they are), at their times if the file has any, else {_CONCURRENCY}
at a time. Ctrl-C stops the servers and reports what was measured.

Exit status: 0 compared; 1 no request was answered by both; 2 an argument is wrong, or a server did not start; 130
interrupted.

examples:
  medialane compare Qwen/Qwen2.5-VL-3B-Instruct --requests traffic.jsonl
  medialane compare ./model --requests batch.jsonl --concurrency 32 --rounds 2 -- --max-model-len 8192
  medialane compare ./model --requests traffic.jsonl --limit 500 --speed 2 --slo-ttft 0.5
  medialane compare ./model --requests traffic.jsonl --against old=http://10.0.0.1:8000 --against new=http://10.0.0.2:8000"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on a model hub")
    parser.add_argument("--requests", type=Path, required=True, metavar="FILE", help="the traffic to replay")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="a server that runs already: one instead of plain vLLM, two instead of both",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of replies and reports (default: a new one)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help="X times as fast as the traffic was")
    parser.add_argument("--concurrency", type=int, metavar="N", help="N requests at a time, whatever their times")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="turns of each server (default 1)")
    parser.add_argument("--as-sent", action="store_true", help="do not make requests greedy and streamed")
    parser.add_argument(
        "--slo-ttft", type=float, default=_SLO.ttft_s, metavar="SECONDS", help="for goodput (default %(default)s)"
    )
    parser.add_argument(
        "--slo-tpot", type=float, default=_SLO.tpot_s, metavar="SECONDS", help="for goodput (default %(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of a request (default 600)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the servers' logs in this folder")
    add_settings(parser, SECTIONS, common=_COMMON)


def run(args: argparse.Namespace) -> int:
    """Compare; 0 unless no request was answered by both. Raises StartupFailed."""
    config = load_config(given_settings(args), file=args.config, sections=SECTIONS)
    _check(args)
    if len(args.against) < 2:
        check_launch(args, config)
        check_start(args.model, args.vllm_args, process_environ())
    folder = args.out or Path(time.strftime("compare-%Y%m%d-%H%M%S"))
    traffic = read_traffic(args.requests, media=folder / "media", limit=args.limit)
    progress = CheckProgress(Console(stderr=True, highlight=False))
    progress.note(f"{len(traffic.requests)} requests ({traffic.format})")
    with logs_folder(args.logs) as logs:
        launch = Launch(**launch_settings(args, config, logs))
        comparison = TrafficComparison(
            traffic=traffic,
            sides=sides_of(args.against, launch, progress),
            pace=_pace(args, traffic),
            rounds=args.rounds,
            as_sent=args.as_sent,
            api_key=launch.api_key,
            metrics_key=launch.metrics_key,
            timeout_s=args.timeout,
        )
        return _compare(args, comparison, folder, progress)


def _compare(args: argparse.Namespace, comparison: TrafficComparison, folder: Path, progress: CheckProgress) -> int:
    progress.note(f"replies and report: {folder}")

    async def work() -> bool:
        with closing(progress):
            await comparison.run(folder, progress)
        return True

    measured_on = machine()
    is_whole = until_signal(work())
    report = make_report(
        comparison,
        model=args.model,
        requests=args.requests.name,
        vllm_flags=args.vllm_args,
        slo=Slo(args.slo_ttft, args.slo_tpot),
        measured_on=measured_on,
    )
    with written(folder, "report.json") as write:
        write(msgspec.json.format(msgspec.json.encode(report), indent=1))
    show(report, Console())
    print(folder / "report.json")
    if not is_whole:
        return EXIT_INTERRUPTED
    return 0 if report.agreement.num_compared and all(side.num_succeeded for side in report.sides) else 1


def _pace(args: argparse.Namespace, traffic: Traffic) -> Pace:
    if args.concurrency is not None:
        return Pace(concurrency=args.concurrency)
    return Pace(speed=args.speed) if traffic.is_timed else Pace(concurrency=_CONCURRENCY)


def _check(args: argparse.Namespace) -> None:
    """Raise StartupFailed for a number that is not positive."""
    for name in ("limit", "concurrency", "rounds", "speed", "slo_ttft", "slo_tpot", "timeout"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise StartupFailed(f"--{name.replace('_', '-')} must be positive")
