"""EngineCore as a fork of its front end is what vLLM's spawned one is; what is imported ahead of it uses no device."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from vllm.platforms import current_platform

from medialane.runtime.forked_ahead import forked_ahead

PROGRAM = Path(__file__).with_name("engine_start_program.py")
OURS = Path(__file__).parents[2] / "src"

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="on a GPU vLLM starts EngineCore its own way")

#: Has one thread, as a worker has when it starts its engine; uses the processes as vLLM does. Prints JSON.
STARTS = """
import json, os, signal, sys, threading
from medialane.runtime.forked_ahead import forked_ahead

def work(file, **given):
    with open(file, "w") as pipe:
        handlers = [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]
        is_new = handlers == [signal.SIG_DFL, signal.default_int_handler]
        json.dump([os.getpid(), os.getppid(), os.environ.get("LATE"), is_new, given, threading.active_count()], pipe)
    raise SystemExit(7)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: None)
    with forked_ahead(2) as forked:
        os.environ["LATE"] = "1"
        used = forked.Process(target=work, name="EngineCore", kwargs={"file": sys.argv[1], "a": [1]})
        used.start()
    used.join()
    json.dump([forked.reason, used.pid, used.exitcode, json.load(open(sys.argv[1])), os.getpid()], sys.stdout)
    sys.stdout.flush()
    os._exit(0)
"""


def environ():
    kept = {name: value for name, value in os.environ.items() if name != "VLLM_WORKER_MULTIPROC_METHOD"}
    paths = os.pathsep.join([str(OURS), str(PROGRAM.parent)])
    return kept | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OPENBLAS_NUM_THREADS": "1"}


def output_of(*command, timeout_s):
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(60)
def test_process_that_was_forked_ahead_is_a_child_with_the_later_environment_and_handlers_of_a_new_one(tmp_path):
    out = output_of(sys.executable, "-c", STARTS, str(tmp_path / "out"), timeout_s=50)
    reason, pid, status, (own_pid, parent, late, has_new_handlers, given, num_threads), front_end = json.loads(out)
    assert (reason, status) == ("", 7)
    assert (own_pid, parent) == (pid, front_end)
    assert (late, has_new_handlers, given, num_threads) == ("1", True, {"a": [1]}, 1)


def test_process_with_threads_forks_nothing():
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        with forked_ahead(1) as forked:
            assert "threads" in forked.reason
    finally:
        release.set()
        thread.join()


@pytest.fixture(scope="module")
def engines(tiny_model, tmp_path_factory):
    """Of both kinds: no other engine can be compared, since a session's is spawned."""
    folder = tmp_path_factory.mktemp("engines")
    return json.loads(output_of(sys.executable, PROGRAM, str(tiny_model), str(folder), timeout_s=170).splitlines()[-1])


@pytest.mark.vllm
def test_forked_engine_has_threads_cores_environment_and_handlers_of_a_spawned_one(engines):
    assert engines["forked"]["ready"]
    assert engines["spawned"]["ready"]
    assert engines["forked"]["facts"] == engines["spawned"]["facts"]
    assert engines["forked"]["title"].rstrip("\0") == engines["spawned"]["title"].rstrip("\0") == "VLLM::EngineCore"


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["forked", "spawned"])
def test_engine_ends_with_its_front_end(engines, kind):
    assert engines[kind]["ended"]


@pytest.mark.vllm
def test_engine_imports_little_that_was_not_imported_ahead(engines):
    """But for the model's own class and processor, each of which has some."""
    late = [name for name in engines["forked"]["late"] if not name.startswith("transformers.models.")]
    assert len(late) < 60, late
