import asyncio
import threading

import pytest

from medialane.runtime.tasks import (
    LARGE_BYTES,
    PIECES_PER_ITERATION,
    SMALL_BYTES,
    FewPerIteration,
    LoopFairness,
)


class LoopTurns:
    """Counts iterations of the event loop while it runs."""

    def __init__(self):
        self.number = 0
        self._handle = asyncio.get_running_loop().call_soon(self._count)

    def _count(self):
        self.number += 1
        self._handle = asyncio.get_running_loop().call_soon(self._count)

    def stop(self):
        self._handle.cancel()


@pytest.fixture
async def loop_turns():
    counter = LoopTurns()
    yield counter
    counter.stop()


async def test_large_steps_never_share_a_loop_iteration(loop_turns):
    fairness, steps = LoopFairness(), []

    async def request():
        for _ in range(5):
            async with fairness.step(SMALL_BYTES):
                steps.append(loop_turns.number)

    await asyncio.gather(*(request() for _ in range(4)))
    assert len(steps) == 20
    assert len(set(steps)) == 20


async def test_large_steps_are_served_fifo():
    fairness, order = LoopFairness(), []

    async def request(name):
        for _ in range(3):
            async with fairness.step(SMALL_BYTES):
                order.append(name)

    await asyncio.gather(*(request(name) for name in "abc"))
    assert order == list("abcabcabc")


async def test_a_few_small_steps_do_not_wait(loop_turns):
    fairness = LoopFairness()

    async def large():
        async with fairness.step(SMALL_BYTES):
            steps.append("large")

    steps = []
    waiting = asyncio.create_task(large())
    before = loop_turns.number
    for _ in range(50):
        async with fairness.step(SMALL_BYTES // 100):
            steps.append("small")
    assert loop_turns.number == before
    await waiting
    assert steps == ["small"] * 50 + ["large"]


async def test_small_steps_of_one_iteration_are_bounded_together(loop_turns):
    fairness, steps = LoopFairness(), []

    async def request():
        async with fairness.step(SMALL_BYTES // 4):
            steps.append(loop_turns.number)

    await asyncio.gather(*(request() for _ in range(30)))
    assert max(steps.count(number) for number in set(steps)) <= 5


async def test_no_await_follows_a_step_so_its_result_survives_cancellation():
    fairness, taken = LoopFairness(), []

    async def request():
        async with fairness.step(SMALL_BYTES):
            taken.append("step")
            asyncio.current_task().cancel()
        taken.append("kept")
        await asyncio.sleep(0)

    task = asyncio.create_task(request())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert taken == ["step", "kept"]


async def test_failed_and_cancelled_steps_admit_the_next_one():
    fairness = LoopFairness()

    async def large():
        async with fairness.step(SMALL_BYTES):
            pass

    first, second = asyncio.create_task(large()), asyncio.create_task(large())
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    with pytest.raises(ValueError, match="broken"):
        async with fairness.step(SMALL_BYTES):
            raise ValueError("broken")
    async with asyncio.timeout(1):
        await large()


async def test_only_large_payloads_are_processed_in_a_thread():
    fairness = LoopFairness()
    assert await fairness.run(100, threading.current_thread) is threading.main_thread()
    assert await fairness.run(LARGE_BYTES, threading.current_thread) is not threading.main_thread()
    fairness.close()


async def test_error_in_the_thread_reaches_the_caller_and_ends_its_step():
    fairness = LoopFairness()
    with pytest.raises(ZeroDivisionError):
        await fairness.run(LARGE_BYTES, lambda: 1 // 0)
    assert await fairness.run(LARGE_BYTES, lambda: 7) == 7
    fairness.close()


async def test_many_pieces_of_one_task_are_spread_over_iterations(loop_turns):
    few, pieces = FewPerIteration(), []
    for _ in range(10 * PIECES_PER_ITERATION):
        await few.next_piece()
        pieces.append(loop_turns.number)
    assert max(map(pieces.count, pieces)) <= PIECES_PER_ITERATION + 1


async def test_pieces_of_many_tasks_are_spread_over_iterations_fifo(loop_turns):
    few, pieces = FewPerIteration(), []

    async def work(number):
        await few.next_piece()
        pieces.append((loop_turns.number, number))

    await asyncio.gather(*map(work, range(10 * PIECES_PER_ITERATION)))
    iterations = [iteration for iteration, _ in pieces]
    assert max(map(iterations.count, iterations)) <= PIECES_PER_ITERATION
    assert [number for _, number in pieces] == list(range(10 * PIECES_PER_ITERATION))


async def test_a_few_pieces_do_not_wait(loop_turns):
    few = FewPerIteration()
    for _ in range(3):
        before = loop_turns.number
        for _ in range(PIECES_PER_ITERATION):
            await few.next_piece()
        assert loop_turns.number == before
        await asyncio.sleep(0)


async def test_cancelled_piece_does_not_delay_the_others(loop_turns):
    few = FewPerIteration()
    tasks = [asyncio.create_task(few.next_piece()) for _ in range(3 * PIECES_PER_ITERATION)]
    await asyncio.sleep(0)
    for task in tasks[PIECES_PER_ITERATION:-1]:
        task.cancel()
    await asyncio.sleep(0)
    before = loop_turns.number
    await tasks[-1]
    assert loop_turns.number - before <= 2
    await asyncio.gather(*tasks, return_exceptions=True)
