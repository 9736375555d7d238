"""`medialane check MODEL --tensors`: runs the process that makes and compares tensors, and reads its report."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from medialane.runtime.phase import PhaseFile
from medialane.runtime.private_file import write_private
from medialane.tools.check.progress import CheckProgress
from medialane.tools.check.server_process import log_tail, logged_process, wait_ended
from medialane.tools.check.servers import Setup
from medialane.tools.check.tensor_report import TensorReport, TensorTask, decode
from medialane.types.errors import StartupFailed

TENSOR_LOG = "tensors.log"
_PROGRAM = "medialane.tools.check.tensor_program"


async def compare_tensors(setup: Setup, progress: CheckProgress) -> TensorReport:
    """Compare the tensors of a model's items. Raises StartupFailed with the end of its log if that takes longer than
    `setup.start_s`, or fails. Cancelled, it leaves no process behind."""
    log, report = setup.logs / TENSOR_LOG, setup.logs / "tensors.json"
    task, phases = setup.logs / "tensors.task", PhaseFile(setup.logs / "tensors.phase")
    write_private(task, msgspec.json.encode(TensorTask(setup.model, tuple(setup.vllm_args), tuple(setup.only))))
    argv = [sys.executable, "-P", "-m", _PROGRAM, str(task), str(report)]
    # As plain vLLM without plugins; ours changes nothing in this process anyway.
    environ = {**setup.environ, "VLLM_PLUGINS": "", **phases.environ()}
    async with progress.starting("tensors", phases):
        await _run(argv, environ, log, setup.start_s)
    return decode(report.read_bytes())


async def _run(argv: list[str], environ: dict[str, str], log: Path, timeout_s: float) -> None:
    async with logged_process(argv, environ, log) as process:
        try:
            async with asyncio.timeout(timeout_s):
                await wait_ended(process)
        except TimeoutError as error:
            raise StartupFailed(f"tensors were not compared within {timeout_s:g} s{log_tail(log)}") from error
    if process.wait():
        raise StartupFailed(f"tensors cannot be compared{log_tail(log)}")
