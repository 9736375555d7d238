"""What is imported ahead of an engine's start uses no device and starts no thread."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, torch
def touched(*_args, **_kwargs): raise AssertionError("a device was used")
torch.cuda._lazy_init = torch._C._cuda_init = touched
from medialane.vllm_bridge.engine.plugin import warm_imports
warm_imports()
print(len(os.listdir("/proc/self/task")), torch.cuda.is_initialized())
"""


@pytest.mark.timeout(60)
def test_imports_ahead_use_no_device_and_start_no_thread():
    environ = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-2:] == ["1", "False"]
