"""The engine's half of preparation, as this room needs it; `vllm_bridge` fills it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from medialane.core.errors import UnsupportedMediaType
from medialane.core.feature import Feature, PlaceholderRange
from medialane.core.media import Decoded, FrameBatch, MediaSize, Video
from medialane.core.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class ProcessedItem:
    """What the engine's processor made of one item: a header, and the large tensors that follow it.

    `buffers[i]` are the bytes of `specs[i]`, C-contiguous, alive as long as this object.
    """

    header: bytes
    specs: tuple[TensorSpec, ...]
    buffers: tuple[memoryview, ...]
    size: MediaSize


class Processor(Protocol):
    """Runs the engine's multimodal processor on one decoded item, inside a preparer. Synchronous, one thread."""

    @property
    def files(self) -> Sequence[str]:
        """Files and folders that it may still have to read once it is warm, beside Python's own."""
        ...

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        """Take the frames that the engine's own sampler takes (`media.FrameSampler`)."""
        ...

    def process(self, media: Decoded, options: bytes) -> ProcessedItem:
        """Process one item alone. `options` are canonical JSON. Raises MedialaneError for what the client did wrong."""
        ...

    def check_size(self, size: tuple[int, int], options: bytes) -> None:
        """Raise PromptTooLong if an image of this (width, height), either way round, has more tokens than any prompt.

        Called before the image is decoded. What cannot be told without its pixels passes.
        """
        ...

    def smaller_size(
        self, size: tuple[int, int], smaller: Sequence[tuple[int, int]], options: bytes
    ) -> tuple[int, int] | None:
        """Which size an image that is processed with `options` may be decoded at (`model_choices.SizeChooser`)."""
        ...


#: A factory as the pool takes it: its fork server starts at once, whatever the model.
NO_PROCESSOR_FACTORY = "medialane.prepare.processor:build_no_processor"

_REFUSAL = "this model does not support media"


def build_no_processor(_config: bytes) -> NoProcessor:
    """Factory of stage `url`, in which preparers only open what workers are about to decode (`media.probe`)."""
    return NoProcessor()


class NoProcessor:
    """Refuses every item (a `Processor`): in stage `url`, and of a model of text alone."""

    files = ()

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        raise UnsupportedMediaType(_REFUSAL)

    def process(self, media: Decoded, options: bytes) -> ProcessedItem:
        raise UnsupportedMediaType(_REFUSAL)

    def check_size(self, size: tuple[int, int], options: bytes) -> None:
        raise UnsupportedMediaType(_REFUSAL)

    def smaller_size(
        self, size: tuple[int, int], smaller: Sequence[tuple[int, int]], options: bytes
    ) -> tuple[int, int] | None:
        raise UnsupportedMediaType(_REFUSAL)


@dataclass(frozen=True, slots=True)
class AssembledPrompt:
    """Expanded token ids, and a placeholder for each of the features given, in the order they were given."""

    token_ids: list[int]
    placeholders: tuple[PlaceholderRange, ...]


class Assembler(Protocol):
    """Expands a prompt's placeholders from its items' metadata alone: neither pixels nor large tensors are read."""

    @property
    def accepts_item_options(self) -> bool:
        """Whether an item's tokens follow from its feature alone, so that items may differ in processor options."""
        ...

    def assemble(self, token_ids: list[int], features: tuple[Feature, ...], options: bytes) -> AssembledPrompt:
        """`features` stand in the order of their modality's items in the request. Raises PromptRejected."""
        ...
