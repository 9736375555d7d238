"""A worker's process over real vLLM: `python worker_program.py MODEL ADDRESS`."""

import sys

import uvloop

from medialane.rpc import RpcConfig
from medialane.vllm_bridge.engine import build_engine
from medialane.vllm_bridge.tiny_model import TINY_MODEL_FLAGS
from medialane.worker import WorkerConfig, serve_worker


def main(model: str, address: str) -> int:
    engine = build_engine(model, TINY_MODEL_FLAGS)
    return uvloop.run(serve_worker(WorkerConfig(), RpcConfig(), engine, address, arena_directory="/dev/shm"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
