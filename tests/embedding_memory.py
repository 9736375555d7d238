"""How fake engines access embeddings in an arena, as EngineCore does."""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from fake_engine import FAKE_CARD
from medialane.arena import ENTRY_HEADER_BYTES, ArenaView, FillWriter
from medialane.types.errors import HandoverFailed
from medialane.types.request import EncoderCard, ModelCard
from medialane.types.tensor import TensorDescriptor

ENCODER = EncoderCard(digest="e" * 64, dtype="float32", widths={"image": 16})
ENCODER_CARD: ModelCard = msgspec.structs.replace(FAKE_CARD, encoder=ENCODER)


async def _at_once() -> None:
    """Do not stop while writing."""


class ArenaEmbeddings:
    """Implements `fake_engine.EmbeddingMemory`. `while_writing` is awaited when half is written."""

    def __init__(self, directory: str, while_writing: Callable[[], Awaitable[object]] = _at_once) -> None:
        self._directory = directory
        self.while_writing = while_writing

    def read(self, tensor: TensorDescriptor) -> bytes:
        view = ArenaView.open(tensor.range.arena, self._directory)
        try:
            return bytes(view.tensor(tensor))
        finally:
            view.close()

    async def write(self, tensor: TensorDescriptor, data: bytes) -> None:
        half, start = len(data) // 2, tensor.offset - ENTRY_HEADER_BYTES
        with suppress(HandoverFailed), FillWriter.open(tensor.range, self._directory) as payload:
            payload[start : start + half] = data[:half]
            await self.while_writing()
            payload[start + half : start + len(data)] = data[half:]
