"""A simulated engine that reads the media of its requests: when it accepts them, and again while it answers."""

from collections.abc import AsyncGenerator, Sequence
from zlib import crc32

from msgspec.structs import replace

from medialane.testing.simulated import SimulatedEngine
from medialane.types.errors import GenerationFailed
from medialane.types.feature import EmbeddingUse
from medialane.types.hashing import content_hash
from medialane.types.request import EngineRequest, OutputDelta

#: Outputs between two readings, but for the last one: reading takes longer than a step.
READ_EVERY = 8


class ReadingEngine(SimulatedEngine):
    """The tokens follow from the bytes of the media: these, not their salted key, name each item."""

    async def generate(
        self,
        request: EngineRequest,
        tensors: Sequence[Sequence[memoryview]],
        embeddings: Sequence[EmbeddingUse | None] = (),
    ) -> AsyncGenerator[OutputDelta, None]:
        before = checksums(tensors)
        media = [
            replace(item, mm_hash=content_hash(str(checksum).encode()))
            for item, checksum in zip(request.prompt.media, before, strict=True)
        ]
        read = replace(request, prompt=request.prompt.with_media(media))
        number = 0
        async for delta in super().generate(read, tensors, embeddings):
            number += 1
            if (delta.finished or number % READ_EVERY == 0) and checksums(tensors) != before:
                raise GenerationFailed("the media were overwritten while they were held")
            yield delta


def checksums(tensors: Sequence[Sequence[memoryview]]) -> list[int]:
    """Of each item."""
    found = []
    for item in tensors:
        checksum = 0
        for tensor in item:
            checksum = crc32(tensor, checksum)
        found.append(checksum)
    return found
