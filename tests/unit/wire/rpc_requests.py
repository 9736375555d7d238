"""Requests, their outputs, and frames."""

import asyncio
import struct

import msgspec

from medialane.gateway.workers import RemoteRequest
from medialane.types.request import EngineRequest, ExpandedPrompt
from waiting import DEADLINE_S


def engine_request(request_id: str, num_tokens: int = 3) -> EngineRequest:
    return EngineRequest(request_id, ExpandedPrompt(list(range(num_tokens))), b"")


async def tokens_of(remote: RemoteRequest) -> list[int]:
    async with asyncio.timeout(DEADLINE_S):
        return [token async for delta in remote for token in delta.completions[0].token_ids]


def raw_frame(content: object) -> bytes:
    body = msgspec.msgpack.encode(content)
    return struct.pack(">I", len(body)) + body
