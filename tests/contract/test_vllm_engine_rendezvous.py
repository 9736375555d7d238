"""Where executors create the file through which their processes meet."""

import os
from urllib.parse import urlsplit

import pytest
from vllm import envs
from vllm.v1.executor import multiproc_executor, uniproc_executor

from medialane.vllm_bridge.seams.engine_core import use_socket_folder


def test_executors_meet_in_the_private_folder(private_folder):
    use_socket_folder()
    folder = private_folder()
    folder.enter()
    for executor in (uniproc_executor, multiproc_executor):
        found = urlsplit(executor.get_file_store_init_method())
        assert found.scheme == "file"
        assert os.path.dirname(found.path) == str(folder.path)


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="session")
async def test_engine_meets_in_the_folder_of_its_sockets(vllm_engine):
    assert vllm_engine.card
    assert any(name.startswith("vllm_dist_") for name in os.listdir(envs.VLLM_RPC_BASE_PATH))
