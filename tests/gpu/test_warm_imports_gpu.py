"""A process that has imported what engines import has no context on a GPU, and so may be forked."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

PROGRAM = """
import os, torch
from medialane.vllm_bridge.engine.plugin import warm_imports
warm_imports()
from pynvml import nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetHandleByIndex, nvmlInit
nvmlInit()
running = nvmlDeviceGetComputeRunningProcesses(nvmlDeviceGetHandleByIndex(0))
print(torch.cuda.is_initialized(), os.getpid() in [process.pid for process in running])
"""


def test_imports_ahead_make_no_context():
    pytest.importorskip("pynvml")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-2:] == ["False", "False"]
