"""`gateway` and `worker` with a vLLM that lacks a seam; `serve` shows the line of the process that exits."""

import dataclasses
import sys

import pytest

from medialane.cli import ERROR_PREFIX, gateway_command, main, worker_command
from medialane.observability import LogProcess
from medialane.vllm_bridge.seams import probe
from medialane.vllm_bridge.seams.table import BOTH, GROUPS, Seam

COMMANDS = {
    "gateway": (gateway_command, ["--worker", "unix:/tmp/no-worker.sock", "--store", "none"]),
    "worker": (worker_command, ["--listen", "unix:/tmp/no-worker.sock"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_start_is_rejected_before_anything_is_loaded(name, monkeypatch, capsys):
    module, flags = COMMANDS[name]
    broken = dataclasses.replace(GROUPS[0], seams=(Seam("no_such_module:name", "read"),), processes=BOTH)
    monkeypatch.setattr(probe, "GROUPS", (broken,))
    monkeypatch.setattr(module, "configure", lambda config, component: LogProcess(component, config))
    monkeypatch.setattr(module, "check_start", lambda *_: None)
    monkeypatch.setattr(module, "enter_environ", lambda *_, **__: None)
    for heavy in ("medialane.vllm_bridge.frontend.app", "medialane.vllm_bridge.engine.engine"):
        monkeypatch.setitem(sys.modules, heavy, None)  # importing it raises
    assert main([name, "model", *flags]) == 2
    *_, line = capsys.readouterr().err.splitlines()  # after what is logged
    assert line.startswith(ERROR_PREFIX)
    assert "no_such_module:name" in line
