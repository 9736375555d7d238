"""What `seams.engine_core.report_phases` leans on: vLLM counts the files of weights by tqdm, and runs the model by
methods of its executor."""

import pytest
import torch
from safetensors.torch import save_file
from vllm.compilation import decorators
from vllm.config import CompilationConfig, CompilationMode, VllmConfig
from vllm.model_executor.model_loader import weight_utils
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.v1.executor.abstract import Executor

from medialane.runtime.phase import Phase, PhaseFile
from medialane.vllm_bridge.seams.engine_core import report_phases


@pytest.fixture
def phases(tmp_path, monkeypatch):
    """All phases that are reported in this process."""
    file, seen = PhaseFile(tmp_path / "worker.phase"), []
    for name, value in file.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(PhaseFile, "write", lambda _file, phase: seen.append(phase))
    for owner, name in (
        (weight_utils, "tqdm"),
        (decorators, "monitor_torch_compile"),
        (Executor, "determine_available_memory"),
        (Executor, "compile_or_warm_up_model"),
        (MultiModalBudget, "get_dummy_encoder_profile_inputs"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    report_phases()
    report_phases()
    return seen


def test_files_of_weights_are_counted(phases, tmp_path):
    files = [str(tmp_path / f"model-{i}.safetensors") for i in range(3)]
    for number, path in enumerate(files):
        save_file({f"weight.{number}": torch.zeros(1)}, path)
    loaded = dict(weight_utils.safetensors_weights_iterator(files, use_tqdm_on_load=False))
    assert len(loaded) == 3
    assert phases == [Phase("loading the weights", done, 3) for done in range(3)]


class Ran(Executor):
    """An executor without a model."""

    def __init__(self):
        pass

    def _init_executor(self):
        raise NotImplementedError

    def collective_rpc(self, method, **_):
        return []

    def check_health(self):
        raise NotImplementedError


def test_executor_reports_what_it_runs_the_model_for(phases):
    executor = Ran()
    assert executor.determine_available_memory() == []
    executor.compile_or_warm_up_model()
    assert [phase.name for phase in phases] == ["profiling", "warming up"]
    assert "--limit-mm-per-prompt" in phases[0].remedy
    assert "--max-model-len" in phases[0].remedy


@pytest.mark.parametrize(
    ("mode", "is_announced", "names"),
    [
        (CompilationMode.VLLM_COMPILE, True, ["compiling"]),
        (CompilationMode.VLLM_COMPILE, False, []),  # loaded from the cache
        (CompilationMode.NONE, True, []),
    ],
)
def test_compilation_is_named(phases, mode, is_announced, names):
    config = VllmConfig(compilation_config=CompilationConfig(mode=mode))
    config.compilation_config.mode = mode
    with decorators.monitor_torch_compile(config, announce_start=is_announced):
        pass
    assert [phase.name for phase in phases] == names


class NoBudget(MultiModalBudget):
    """Of a model with videos."""

    mm_max_toks_per_item = {"image": 100, "video": 2000}  # noqa: RUF012 - read only

    def __init__(self):
        pass

    def get_encoder_budget(self):
        return 0


@pytest.mark.parametrize(("given", "modality"), [((), "video"), (("image", 1), "image")])
def test_modality_of_the_profiled_items_is_named(phases, given, modality):
    assert NoBudget().get_dummy_encoder_profile_inputs(*given) == []
    assert [phase.name for phase in phases] == [f"profiling the largest {modality}"]
