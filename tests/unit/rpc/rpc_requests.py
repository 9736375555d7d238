"""Requests, and what tests wait for."""

import asyncio
import struct
from collections.abc import Callable

import msgspec

from medialane.core.request import EngineRequest, ExpandedPrompt
from medialane.rpc import RemoteRequest

DEADLINE_S = 10.0


def engine_request(request_id: str, num_tokens: int = 3) -> EngineRequest:
    return EngineRequest(request_id, ExpandedPrompt(list(range(num_tokens))), b"")


async def tokens_of(remote: RemoteRequest) -> list[int]:
    async with asyncio.timeout(DEADLINE_S):
        return [token async for delta in remote for token in delta.completions[0].token_ids]


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event, by design
            await asyncio.sleep(0.005)


def raw_frame(content: object) -> bytes:
    body = msgspec.msgpack.encode(content)
    return struct.pack(">I", len(body)) + body
