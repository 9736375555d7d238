import asyncio

from medialane.gateway.admission import OldestFirst


async def settled():
    for _ in range(3):
        await asyncio.sleep(0)  # time: one step of each task that waits


async def test_turns_go_to_the_oldest_and_no_more_than_the_limit_are_taken():
    turns, taken = OldestFirst(lambda: 2), []

    async def take(since):
        end = await turns.take(since)
        taken.append(since)
        return end

    tasks = [asyncio.create_task(take(since)) for since in (1, 2, 9, 7, 8)]
    await settled()
    assert taken == [1, 2]
    for task in tasks[:2]:
        end = task.result()
        end()
        end()
        await settled()
    assert taken == [1, 2, 7, 8], "ending a turn twice frees one"
    for task in (tasks[3], tasks[4]):
        (await task)()
    assert len([await task for task in tasks]) == 5


async def test_cancelled_waiter_leaves_its_turn_to_others():
    turns = OldestFirst(lambda: 1)
    end = await turns.take(0)
    first, second = (asyncio.create_task(turns.take(since)) for since in (1, 2))
    await settled()
    first.cancel()
    end()
    (await asyncio.wait_for(second, 5))()
    end = await asyncio.wait_for(turns.take(3), 5)
    waiting = asyncio.create_task(turns.take(4))
    await settled()
    end()  # the turn is given
    waiting.cancel()  # before it is taken
    await asyncio.wait([waiting])
    await asyncio.wait_for(turns.take(5), 5)


async def test_late_turn_is_given_beyond_the_limit_and_ends_like_any_other():
    turns = OldestFirst(lambda: 1)
    end = await turns.take(0)
    late = await turns.take(1, within_s=0.01)
    waiting = asyncio.create_task(turns.take(2, within_s=60))
    end()
    await settled()
    assert not waiting.done(), "the late turn is taken"
    late()
    (await asyncio.wait_for(waiting, 5))()
    assert turns.is_free
