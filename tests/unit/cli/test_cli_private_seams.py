"""`gateway` and `worker` with a vLLM that lacks a seam; `serve` shows the line of the process that exits."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

import pytest
from own_process import run_command

from medialane.cli import ERROR_PREFIX

COMMANDS = {
    "gateway": ["--worker", "unix:/tmp/no-worker.sock", "--store", "none"],
    "worker": ["--listen", "unix:/tmp/no-worker.sock"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_start_is_rejected_before_anything_is_loaded(name, monkeypatch, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    loaded = [module for module in sys.modules if module.startswith("vllm.")]  # by other tests
    for absent in (*loaded, "medialane.vllm_bridge.frontend.app", "medialane.vllm_bridge.engine.engine"):
        monkeypatch.setitem(sys.modules, absent, None)  # importing it raises
    monkeypatch.setitem(sys.modules, "vllm", module_from_spec(ModuleSpec("vllm", None)))  # an empty one
    assert run_command(name, str(tmp_path), *COMMANDS[name]) == 2
    *_, line = capsys.readouterr().err.splitlines()  # after what is logged
    assert line.startswith(ERROR_PREFIX)
    assert "private seams that it uses are broken: " in line
    assert "is missing: no module vllm" in line
