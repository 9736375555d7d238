"""`medialane check MODEL --tensors`: runs the process that makes and compares tensors (`tensor_program`), and its
report, each item's fields compared."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Literal

import msgspec

from medialane.runtime.phase import PhaseFile
from medialane.runtime.private_files import write_private
from medialane.tools.check.servers import CheckProgress, CheckSetup, log_tail, logged_process, wait_ended
from medialane.types.errors import StartupFailed
from medialane.types.media import Modality
from medialane.types.tensor import FieldComparison, PixelNormalisation

#: Whose tensors: plain vLLM's, medialane's, those of Hugging Face's `AutoProcessor`.
Source = Literal["plain", "ours", "hugging_face"]


class TensorTask(msgspec.Struct, frozen=True):
    """What is compared: a model with vLLM's flags; the items whose names contain one of the words `only`, or all."""

    model: str
    vllm_args: tuple[str, ...]
    only: tuple[str, ...] = ()


class ItemTensors(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item. `stage` is the one in which medialane serves such items. `errors` are of those that refuse it; if plain
    vLLM or medialane does, there are no fields."""

    item: str
    modality: Modality
    stage: str
    fields: tuple[FieldComparison, ...] = ()
    errors: dict[Source, str] = {}

    @property
    def is_equal(self) -> bool:
        """Whether medialane gives an engine the very tensors of plain vLLM, or both refuse the item."""
        if self.errors.keys() & {"plain", "ours"}:
            return "plain" in self.errors
        return all(field.of_ours.relation == "equal" for field in self.fields)


class TensorReport(msgspec.Struct, frozen=True, kw_only=True):
    """`hugging_face` is the class of its processor; empty if the model has none, for the reason `no_hugging_face`.
    `normalisation` is what the engine does to raw pixels; None if it gets normalised ones."""

    model: str
    medialane: str
    vllm: str
    transformers: str
    vllm_flags: tuple[str, ...]
    dtype: str
    hugging_face: str
    no_hugging_face: str = ""
    normalisation: PixelNormalisation | None
    items: tuple[ItemTensors, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all items are equal, and plain vLLM has accepted one at all."""
        return all(item.is_equal for item in self.items) and any(item.fields for item in self.items)


TENSOR_LOG = "tensors.log"
_PROGRAM = "medialane.tools.check.tensor_program"


async def compare_tensors(setup: CheckSetup, progress: CheckProgress) -> TensorReport:
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
    return msgspec.json.decode(report.read_bytes(), type=TensorReport)


async def _run(argv: list[str], environ: dict[str, str], log: Path, timeout_s: float) -> None:
    async with logged_process(argv, environ, log) as process:
        try:
            async with asyncio.timeout(timeout_s):
                await wait_ended(process)
        except TimeoutError as error:
            raise StartupFailed(f"tensors were not compared within {timeout_s:g} s{log_tail(log)}") from error
    if process.wait():
        raise StartupFailed(f"tensors cannot be compared{log_tail(log)}")
