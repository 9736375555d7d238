import asyncio
import threading

import pytest

from medialane.gateway.request.assembly import MAX_ITEMS_ON_LOOP, MAX_OPTIONS_BYTES, MAX_TOKENS_ON_LOOP, Assembly
from medialane.prepare import AssembledPrompt, ImageCost
from medialane.types.errors import PromptRejected
from medialane.types.feature import Feature, MediaPrompt
from medialane.types.media import MediaSize
from waiting import iterations


class Recorder:
    """Answers with the prompt's own ids, remembers the threads that called, waits for `go` in all but the main one."""

    max_tokens = 100

    def __init__(self):
        self.costs = []
        self.threads = []
        self.called = threading.Event()
        self.go = threading.Event()

    def assemble(self, token_ids, features, options):
        self.threads.append(threading.current_thread())
        self.called.set()
        if threading.current_thread() is not threading.main_thread():
            self.go.wait(5)
        if token_ids == [0]:
            raise PromptRejected("no")
        return AssembledPrompt(token_ids, ())

    def image_cost(self, size, options):
        self.threads.append(threading.current_thread())
        self.costs.append((size, options))
        return None if options == b'{"size":1}' else ImageCost(size[0])


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def assembly(recorder):
    assembly = Assembly(recorder)
    yield assembly
    recorder.go.set()
    assembly.close()


def prompt(num_tokens=3):
    return MediaPrompt([1] * num_tokens, ())


def image(side):
    return Feature("image", "ab" * 32, b"", (), MediaSize(width=side, height=side))


async def test_short_prompt_is_expanded_on_the_event_loop(assembly, recorder):
    await assembly.assemble(prompt(), (image(1000),))
    assert recorder.threads == [threading.main_thread()]


async def test_prompt_is_short_if_its_images_take_few_tokens_however_many_pixels_they_have(assembly, recorder):
    recorder.go.set()
    pages = (Feature("image", "ab" * 32, b"", (), MediaSize(width=200, height=80_000)),) * 10
    assert await assembly.image_cost((200, 80_000), b"{}") == ImageCost(200)
    await assembly.assemble(prompt(), pages)
    assert recorder.threads[-1] is threading.main_thread()


async def test_prompt_with_hours_of_audio_is_expanded_in_the_thread(assembly, recorder):
    recorder.go.set()
    clip = Feature("audio", "ab" * 32, b"", (), MediaSize(num_samples=3600 * 16_000, sample_rate=16_000))
    await assembly.assemble(prompt(), (clip,))
    assert recorder.threads != [threading.main_thread()]


@pytest.mark.parametrize(
    ("num_tokens", "num_items", "side"),
    [(MAX_TOKENS_ON_LOOP + 1, 1, 9), (3, MAX_ITEMS_ON_LOOP + 1, 9), (3, 1, 4000), (MAX_TOKENS_ON_LOOP - 1000, 1, 1000)],
)
async def test_long_prompt_is_expanded_in_the_thread(assembly, recorder, num_tokens, num_items, side):
    recorder.go.set()
    found = await assembly.assemble(prompt(num_tokens), (image(side),) * num_items)
    assert len(found.token_ids) == num_tokens
    assert recorder.threads != [threading.main_thread()]


async def test_prompt_with_processor_options_is_expanded_in_the_thread(assembly, recorder):
    recorder.go.set()
    await assembly.assemble(MediaPrompt([1], (), b'{"max_pixels":3136}'), ())
    assert recorder.threads != [threading.main_thread()]


async def test_short_prompt_waits_while_the_thread_owns_the_assembler(assembly, recorder):
    long = asyncio.create_task(assembly.assemble(prompt(MAX_TOKENS_ON_LOOP + 1), ()))
    await asyncio.to_thread(recorder.called.wait, 5)
    short = asyncio.create_task(assembly.assemble(prompt(), ()))
    await iterations(5)
    assert not short.done()
    recorder.go.set()
    await asyncio.gather(long, short)
    assert len(set(recorder.threads)) == 1
    await assembly.assemble(prompt(), ())
    assert recorder.threads[-1] is threading.main_thread()


async def test_cancelled_caller_does_not_release_the_assembler_early(assembly, recorder):
    long = asyncio.create_task(assembly.assemble(prompt(MAX_TOKENS_ON_LOOP + 1), ()))
    await asyncio.to_thread(recorder.called.wait, 5)
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    short = asyncio.create_task(assembly.assemble(prompt(), ()))
    await iterations(5)
    assert not short.done()
    recorder.go.set()
    await short
    assert threading.main_thread() not in recorder.threads


async def test_rejection_reaches_the_caller_from_both_places(assembly, recorder):
    recorder.go.set()
    with pytest.raises(PromptRejected):
        await assembly.assemble(MediaPrompt([0], ()), ())
    with pytest.raises(PromptRejected):
        await assembly.assemble(MediaPrompt([0], ()), (image(9),) * (MAX_ITEMS_ON_LOOP + 1))


async def test_cost_of_an_image_size_is_computed_once_in_the_thread(assembly, recorder):
    for options, expected in ((b"{}", ImageCost(7)), (b'{"size":1}', None)):
        assert [await assembly.image_cost((7, 9), options) for _ in range(2)] == [expected] * 2
    assert recorder.costs == [((7, 9), b"{}"), ((7, 9), b'{"size":1}')]
    assert threading.main_thread() not in recorder.threads


async def test_cost_of_an_image_with_long_options_is_not_computed(assembly, recorder):
    assert await assembly.image_cost((7, 9), b'{"size":{"%s":1}}' % (b"x" * MAX_OPTIONS_BYTES)) is None
    assert not recorder.costs
