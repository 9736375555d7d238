"""SIGTERM ends everything; runs last, since it stops the shared servers."""

import pytest
from openai_http import chat, picture, text
from process_tree import descendants, is_alive

from waiting import eventually

pytestmark = pytest.mark.vllm


async def test_sigterm_leaves_no_process_arena_or_socket(serve, ours, runtime_directory):
    await ours.succeed(chat(picture(200), text("Describe the picture.")))
    everyone = descendants(serve.pid)
    assert len(everyone) >= 2 * 2 + 1 + 1 + 2  # workers and engines, the gateway, its fork server and preparers
    arenas = serve.arenas()
    assert arenas
    assert list(runtime_directory.iterdir())
    assert serve.stop() == 0, serve.tail()
    await eventually(lambda: not any(map(is_alive, everyone)), "everyone has ended", 10, more=lambda: everyone)
    assert not [path for path in arenas if path.exists()]
    assert not list(runtime_directory.iterdir())
