"""Reports what vLLM's engine does until it is ready (`core.phase`): its own log has it in words, and only some."""

from __future__ import annotations

from medialane.core.process.phase import Phase, enter_phase, report_phase
from medialane.vllm_bridge.seams.start_phases import watch

_REMEDY = (
    "vLLM measures the memory of the largest request that its settings allow. Smaller limits take less time: after a"
    """ lone `--`, --limit-mm-per-prompt '{"image": 4, "video": 0}' and --max-model-len 8192, for example;"""
    " --skip-mm-profiling leaves out the media, --enforce-eager the compilation"
)


def install() -> None:
    """Report the phases of an engine in this process, or in one that is forked from it. Idempotent."""
    watch(loading=_loading, profiling=_profiling, warming_up=lambda: enter_phase("warming up"))


def _loading(num_files: int, num_total: int) -> None:
    report_phase(Phase("loading the weights", num_files, num_total))


def _profiling(modality: str) -> None:
    what = f" the largest {modality}" if modality else ""
    report_phase(Phase(f"profiling{what}", remedy=_REMEDY))
