"""The file through which the processes of an engine find each other (torch's FileStore)."""

from __future__ import annotations

from uuid import uuid4

from vllm import envs
from vllm.v1.executor import multiproc_executor, uniproc_executor


def use_socket_folder() -> None:
    """Create the file where vLLM creates its sockets, not in the folder for temporary files, in which it stays. For
    executors created in this process, or in one forked from it. Idempotent."""
    for executor in (uniproc_executor, multiproc_executor):
        executor.get_file_store_init_method = _init_method


def _init_method() -> str:
    return f"file://{envs.VLLM_RPC_BASE_PATH}/vllm_dist_{uuid4().hex}"
