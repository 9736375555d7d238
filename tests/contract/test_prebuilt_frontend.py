"""A gateway's front end that was built before the gateway was forked is the one that the gateway would build."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from medialane.types.errors import StartupFailed
from medialane.vllm_bridge.frontend import build_frontend, take_frontend

PROGRAM = Path(__file__).with_name("prebuilt_program.py")
FLAGS = ["--max-model-len=8192", "--enforce-eager", "--language-model-only"]

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def answers(tiny_model):
    """Of both kinds; the program imports vLLM and runs five apps."""
    environ = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, PROGRAM, str(tiny_model)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["text", "pooling"])
def test_prebuilt_front_end_answers_like_one_of_its_own_process(answers, kind):
    cold, warm = answers["cold"][kind], answers["warm"][kind]
    assert cold["has_built"]
    assert not warm["has_built"]
    assert warm["answers"] == cold["answers"]
    statuses = {status for _, status, *_ in cold["answers"]}
    assert {200, 401, 404} <= statuses, cold["answers"]


def test_front_end_for_other_flags_is_not_used(answers):
    assert answers["other"]


def test_building_a_front_end_leaves_one_thread(answers):
    assert answers["num_threads"] == 1


def test_each_front_end_has_its_own_parts(tiny_model):
    build_frontend(str(tiny_model), FLAGS)
    first, second = (take_frontend(str(tiny_model), FLAGS) for _ in range(2))
    assert first.renderer is not second.renderer
    assert first.routes is not second.routes


def test_wrong_flag_is_refused_when_it_is_built(tiny_model):
    with pytest.raises(StartupFailed, match="no-such-flag"):
        build_frontend(str(tiny_model), ["--no-such-flag=1"])


def test_missing_model_is_refused_when_it_is_built(tmp_path):
    with pytest.raises(StartupFailed, match="cannot load"):
        build_frontend(str(tmp_path), FLAGS)
