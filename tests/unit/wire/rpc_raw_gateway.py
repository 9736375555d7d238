"""A gateway that sends arbitrary messages."""

import asyncio
import contextlib

from medialane.wire import FrameReader, append_frame, decode_from_worker
from waiting import DEADLINE_S


class RawGateway:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = FrameReader(1 << 20)

    @classmethod
    async def connect(cls, path: str) -> "RawGateway":
        return cls(*await asyncio.open_unix_connection(path))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def send(self, message: object) -> None:
        buffer = bytearray()
        append_frame(buffer, message, 1 << 20)
        self.write(bytes(buffer))

    async def next(self, *kinds: type) -> object:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                frame = self._frames.next_frame()
                if frame is None:
                    data = await self._reader.read(65536)
                    assert data, "the worker hung up"
                    self._frames.receive(data)
                elif isinstance(message := decode_from_worker(frame), kinds):
                    return message

    async def is_disconnected(self) -> bool:
        async with asyncio.timeout(DEADLINE_S):
            try:
                while await self._reader.read(65536):
                    pass
            except ConnectionResetError:
                pass
        return True

    async def flood(self, data: bytes) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                self.write(data)
                await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
