"""Which rendering calls run on the event loop, and which in the renderer's thread."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from medialane.vllm_bridge.frontend.renderer_hook import MAX_TEXT_BYTES, InlineRendering


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as found:
        yield found


@pytest.fixture
def run(pool):
    """Runs work as vLLM's renderer does, for the body size in `run.backend`; returns an awaitable."""
    backend = SimpleNamespace(text_bytes=100)
    submit = InlineRendering(pool.submit, backend).submit

    def found(work):
        return asyncio.get_running_loop().run_in_executor(SimpleNamespace(submit=submit), work)

    found.backend = backend
    return found


async def is_inline(run):
    return await run(threading.get_ident) == threading.get_ident()


async def test_short_prompt_is_rendered_on_the_event_loop_without_an_iteration(run):
    future = run(threading.get_ident)
    assert future.done()
    assert await future == threading.get_ident()


async def test_exception_of_an_inline_call_is_raised_by_its_future(run):
    def fail():
        raise ValueError("no template")

    with pytest.raises(ValueError, match="no template"):
        await run(fail)


@pytest.mark.parametrize("size", [None, MAX_TEXT_BYTES + 1])
async def test_prompts_not_known_to_be_short_are_rendered_in_the_thread(run, size):
    run.backend.text_bytes = size
    assert not await is_inline(run)


async def test_nothing_is_rendered_inline_while_the_thread_is_working(run):
    resume = threading.Event()
    run.backend.text_bytes = None
    long = run(lambda: resume.wait(10))
    run.backend.text_bytes = 1
    short = run(threading.get_ident)
    resume.set()
    assert await long
    assert await short != threading.get_ident()
    assert await is_inline(run)


async def test_inline_time_per_iteration_is_limited(run):
    def long():
        time.sleep(0.005)  # time: more than the loop renders in an iteration
        return threading.get_ident()

    first, second = run(long), run(threading.get_ident)
    assert await first == threading.get_ident()
    assert await second != threading.get_ident()
    assert await is_inline(run)
