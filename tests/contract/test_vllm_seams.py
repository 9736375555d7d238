"""The table of private seams, checked against the installed vLLM: failures show what an upgrade broke."""

import importlib
import subprocess
import sys
import time

import pytest

from medialane.vllm_bridge.seams import probe
from medialane.vllm_bridge.seams.table import GROUPS

#: Another test of this process may have loaded our plugin, which replaces vLLM's class.
pytestmark = pytest.mark.usefixtures("vllms_condition")

SEAMS = [seam for group in GROUPS for seam in group.seams]


@pytest.mark.timeout(120)  # the first import of vLLM
def test_installed_vllm_has_every_seam():
    """In a process of its own: other tests of this one have replaced functions of vLLM."""
    code = "from medialane.vllm_bridge.seams import probe; print(*probe.probe(), sep='\\n', end='')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == ""


def test_probe_is_fast_once_vllm_is_imported():
    probe.probe()
    before = time.thread_time()
    probe.probe()
    assert time.thread_time() - before < 0.5  # some 0.03 s


@pytest.mark.parametrize(
    "seam", [s for s in SEAMS if s.where.startswith("vllm.") and ":" in s.where], ids=lambda seam: seam.where
)
def test_seam_removed_from_vllm_is_named(seam, monkeypatch):
    module, _, path = seam.where.partition(":")
    holder, _, name = path.rpartition(".")
    owner = probe.resolve(f"{module}:{holder}") if holder else importlib.import_module(module)
    monkeypatch.delattr(owner, name)
    assert any(broken.seam == seam for broken in probe.probe())


@pytest.mark.parametrize(
    "seam", [s for s in SEAMS if s.kind in ("override", "replace") and s.parameters], ids=lambda seam: seam.where
)
def test_parameter_added_to_a_replaced_function_is_named(seam, monkeypatch):
    holder, _, name = seam.where.replace(":", ":.").rpartition(".")
    names = ", ".join((*seam.parameters, "added_by_vllm"))
    monkeypatch.setattr(probe.resolve(holder.rstrip(".:")), name, eval(f"lambda {names}: None"))
    assert any(broken.seam == seam and "added_by_vllm" in broken.why for broken in probe.probe())


@pytest.mark.parametrize("seam", [s for s in SEAMS if s.called_in], ids=lambda seam: seam.where)
def test_replacement_no_longer_called_by_vllm_is_named(seam, monkeypatch):
    module, _, path = seam.called_in.partition(":")
    holder, _, name = path.rpartition(".")
    owner = probe.resolve(f"{module}:{holder}") if holder else importlib.import_module(module)
    monkeypatch.setattr(owner, name, lambda *_: None)
    assert any(broken.seam == seam and seam.called_in in broken.why for broken in probe.probe())
