"""vLLM's processor, built before its fork server is forked, makes what it makes in one that is exec'ed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]

PROGRAM = Path(__file__).with_name("preparers_program.py")


def test_prebuilt_processor_is_ready_at_once_and_makes_equal_features(tiny_model):
    # The order of the fields is that of a set of vLLM's, and differs between any two processes without a fixed seed.
    environ = os.environ | {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tiny_model)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    forked, execed = json.loads(done.stdout.splitlines()[-1])
    assert (forked["is_prebuilt"], execed["is_prebuilt"]) == (True, False)
    assert forked["made"] == execed["made"]
    assert forked["num_threads"] == execed["num_threads"] == 1
    assert forked["ready_s"] < execed["ready_s"]
