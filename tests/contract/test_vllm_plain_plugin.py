"""vLLM loads our plugin in every process of its environment, also in plain vLLM's: these keep vLLM's classes."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.whole, pytest.mark.timeout(120)]

#: As in an engine's processes: vLLM loads plugins when these modules are there.
PROGRAM = """
import json
import vllm.v1.engine.core as core
from vllm.distributed.device_communicators import shm_broadcast
from vllm.plugins import load_general_plugins
from vllm.v1.executor import multiproc_executor, uniproc_executor
load_general_plugins()
changeable = {
    "decoder": core.MsgpackDecoder,
    "add": core.EngineCore.preprocess_add_request,
    "wait": shm_broadcast.SpinCondition,
    "rendezvous": uniproc_executor.get_file_store_init_method,
    "rendezvous of ranks": multiproc_executor.get_file_store_init_method,
}
print(json.dumps({name: found.__module__ for name, found in changeable.items()}))
"""


def modules_of(environ):
    """Return where the classes and functions of a vLLM process come from, by name."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=100, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_plain_vllm_keeps_its_classes():
    environ = {name: value for name, value in os.environ.items() if name not in ("VLLM_RPC_BASE_PATH", "VLLM_PLUGINS")}
    found = modules_of(environ)
    assert all(module.startswith("vllm.") for module in found.values()), found


def test_processes_of_our_engine_inherit_that_they_are_ours(private_folder, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    private_folder().enter()
    found = modules_of(dict(os.environ))
    assert found["decoder"].startswith("medialane."), found
    assert found["rendezvous"].startswith("medialane."), found
