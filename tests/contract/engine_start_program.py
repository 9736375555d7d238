"""Starts vLLM's engine, forked and spawned, and prints JSON: what EngineCore's process is like, of both kinds; whether
it has ended with its front end. `python engine_start_program.py MODEL FOLDER`, with FOLDER for files.

Each front end is a fork of this process, which has imported what a worker imports, and is killed at last.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch

from medialane.runtime.linux import exit_at_once, reserve_title
from medialane.vllm_bridge.engine.engine import build_engine
from medialane.vllm_bridge.engine.plugin import warm_imports
from medialane.vllm_bridge.seams.cpu import CpuExecutor

FLAGS = [
    "--max-model-len=2048",
    "--enforce-eager",
    "--skip-mm-profiling",
    '--limit-mm-per-prompt={"image":1,"video":0}',
    "--distributed-executor-backend=engine_start_program.ReportingExecutor",
]
FILE = "ENGINE_START_FILE"
#: Set anew by each start; cv2 prepends a folder of its own to the last at each import.
VARYING = {"VLLM_RPC_BASE_PATH", "VLLM_DIST_IDENT", "VLLM_WORKER_MULTIPROC_METHOD", "_", FILE, "LD_LIBRARY_PATH"}


class ReportingExecutor(CpuExecutor):
    """Writes down what the process is like once the model is loaded."""

    def compile_or_warm_up_model(self):
        result = super().compile_or_warm_up_model()
        facts = {
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
            "openmp": torch.__config__.parallel_info().partition("Environment")[0],
            "cores": sorted(os.sched_getaffinity(0)),
            "handlers": [repr(signal.getsignal(n)).split(" at ")[0] for n in (signal.SIGINT, signal.SIGTERM)],
            "environ": {name: value for name, value in os.environ.items() if name not in VARYING},
            "seed": torch.initial_seed(),
        }
        Path(os.environ[FILE]).write_text(
            json.dumps({"pid": os.getpid(), "modules": sorted(sys.modules), "facts": facts})
        )
        return result


def started(model, file, method):
    """Start an engine in a fork, and kill that when the engine is ready. Return what its EngineCore has written."""
    warm = set(sys.modules)
    began = time.monotonic()
    reader, writer = os.pipe()
    front_end = os.fork()
    if front_end == 0:
        os.environ[FILE] = str(file)
        if method:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
        engine = build_engine(model, FLAGS)
        asyncio.run(engine.ping(20))
        os.write(writer, b"1")
        signal.pause()
    os.close(writer)
    is_ready = os.read(reader, 1) == b"1"
    took_s = time.monotonic() - began
    written = json.loads(file.read_text())
    title = Path(f"/proc/{written['pid']}/cmdline").read_text()
    os.kill(front_end, signal.SIGKILL)
    os.waitpid(front_end, 0)
    deadline = time.monotonic() + 10
    while not (ended := _has_ended(written["pid"])) and time.monotonic() < deadline:
        time.sleep(0.01)  # time: between two polls
    late = sorted(set(written["modules"]) - warm)
    return {
        "ready": is_ready, "facts": written["facts"], "late": late, "title": title, "ended": ended, "took_s": took_s,
    }  # fmt: skip


def _has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def main(model, folder):
    warm_imports()
    num_threads = len(os.listdir("/proc/self/task"))
    forked, spawned = (
        started(model, Path(folder) / kind, method) for kind, method in (("forked", ""), ("spawned", "spawn"))
    )
    return {"forked": forked, "spawned": spawned, "num_threads": num_threads}


if __name__ == "__main__":
    reserve_title()
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    logging.basicConfig(level=logging.INFO)
    sys.modules["engine_start_program"] = sys.modules["__main__"]  # the class is the one that the executor's name means
    with contextlib.redirect_stdout(sys.stderr):
        result = main(*sys.argv[1:])
    sys.stdout.write("\n" + json.dumps(result))  # after what EngineCore has logged
    exit_at_once(0)
