"""A client of a store of patterns in a process of its own: ADDRESS DIRECTORY COMMAND. It prints what it has done.

hold C      hold the item C, and check it all the time
send C      send the bytes of item C, and stop (SIGSTOP) when half of them are written
encode C    get memory for the embedding C, and stop while a process of the engine writes there
"""

import asyncio
import os
import signal
import sys

from store_world import ITEM_BYTES, RPC, pattern, reference, wanted

from medialane.arena import FillWriter
from medialane.store import FindItem, StoreEntries, StoreLink


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


async def hold(link: StoreLink, content: str) -> None:
    found = await link.call(lambda call_id: FindItem(call_id, reference(content), "processed"))
    say("holds")
    expected = pattern(content) * ITEM_BYTES
    while True:
        assert bytes(link.tensor(found.feature.tensors[0])) == expected, "the bytes of another item are read"
        await asyncio.sleep(0.01)  # time: between two looks


async def send(link: StoreLink, content: str) -> None:
    async def write(question) -> None:
        payload = link.payload(question.range)
        half = ITEM_BYTES // 2
        payload[:half] = pattern(content) * half
        if not stopped:
            stopped.append(True)
            say("writes")
            stop()
        payload[half:] = pattern(content) * half

    stopped: list[bool] = []
    found = await link.call(
        lambda call_id: FindItem(call_id, reference(content), "processed", num_bytes=ITEM_BYTES), write
    )
    assert bytes(link.tensor(found.feature.tensors[0])) == pattern(content) * ITEM_BYTES
    say("sent")


async def encode(link: StoreLink, content: str, directory: str) -> None:
    found = await StoreEntries(link).embedding(wanted(content), wait_s=0)
    assert found is not None
    assert not found.is_filled
    with FillWriter.open(found.embedding.tensor.range, directory) as payload:
        half = len(payload) // 2
        payload[:half] = pattern(content) * half
        say("writes")
        stop()
        payload[half:] = pattern(content) * (len(payload) - half)
    found.hold.release()
    say("written")
    await asyncio.Event().wait()


async def main(address: str, directory: str, command: str, content: str) -> None:
    link = StoreLink(address, rpc=RPC, arena_directory=directory, wait_timeout_s=30.0, writable=True)
    running = asyncio.create_task(link.run())
    await link.ready()
    match command:
        case "hold":
            await hold(link, content)
        case "send":
            await send(link, content)
        case "encode":
            await encode(link, content, directory)
    running.cancel()
    await asyncio.wait([running])


asyncio.run(main(*sys.argv[1:]))
