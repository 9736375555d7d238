"""The engine's part of preparation: the interfaces that this package needs, implemented by `vllm_bridge`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from medialane.media import png_of
from medialane.types.errors import UnsupportedMediaType
from medialane.types.feature import Feature, Header, PlaceholderRange
from medialane.types.media import Decoded, FrameBatch, MediaSize, Modality, StageName, Video
from medialane.types.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class ProcessedItem:
    """The engine's processor output for one item: a header, and the large tensors that belong to it.

    `buffers[i]` are the bytes of `specs[i]`, C-contiguous, valid as long as this object.
    """

    header: bytes
    specs: tuple[TensorSpec, ...]
    buffers: tuple[memoryview, ...]
    size: MediaSize


class Described(msgspec.Struct, frozen=True, array_like=True):
    """What is the same in all items of one size and options: the header, and the size that prompt assembly uses."""

    header: Header
    size: MediaSize


def decoded_item(media: Decoded) -> ProcessedItem:
    """Return the array of decoded media as one tensor, laid out as in `types.media`, with an empty header (stage
    `decoded`)."""
    array: NDArray[Any] = np.ascontiguousarray(media.array)
    spec = TensorSpec(array.dtype.name, array.shape)  # type: ignore[arg-type]  # it checks the name
    return ProcessedItem(header=b"", specs=(spec,), buffers=(array.data,), size=media.size)


def image_file(media: Decoded) -> ProcessedItem:
    """Return an image as a PNG file of the same pixels, one tensor of bytes (stage `url`)."""
    data = memoryview(png_of(np.asarray(media.array, np.uint8)))
    return ProcessedItem(header=b"", specs=(TensorSpec("uint8", (len(data),)),), buffers=(data,), size=media.size)


class Processor(Protocol):
    """Runs the engine's multimodal processor on one decoded item, inside a preparer. Synchronous, one thread."""

    @property
    def settings(self) -> Mapping[str, str]:
        """Everything that affects its results, by name; store, gateways and workers compare it. Empty: no model."""
        ...

    @property
    def files(self) -> Sequence[str]:
        """Files and folders that it may still have to read once it is warm, besides Python's own."""
        ...

    def enter_forkserver(self) -> None:
        """Called once in the process that preparers fork from, whose environment is set: from now on, no library may
        start a thread or use the network, also one that was loaded with another environment."""
        ...

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        """Sample the same frames as the engine's own sampler (`types.media.FrameSampler`)."""
        ...

    def process(self, media: Decoded, options: bytes) -> ProcessedItem:
        """Process one item separately. `options` are canonical JSON. Raises MedialaneError for client errors."""
        ...

    def describe(self, modality: Modality, size: MediaSize, options: bytes) -> Described | None:
        """Return what all items have in common that `process` makes of media of this size (as decoded); None if the
        header also depends on their content. Raises what `process` raises."""
        ...


class FactoryConfig(msgspec.Struct, frozen=True):
    """What the factory of a model's processor needs, as JSON."""

    model: str
    vllm_args: list[str]
    max_sampled_frames: int = 768


#: A factory for the pool that loads no model: its fork server starts at once.
NO_PROCESSOR_FACTORY = "medialane.prepare.processor:NoProcessor"

_REFUSAL = "this model does not support media"


class NoProcessor:
    """A `Processor` that refuses every item: for stage `url`, in which preparers only probe items before workers decode
    them (`media.probe`), and for text-only models."""

    files = ()
    settings: Mapping[str, str] = MappingProxyType({})

    def __init__(self, _config: bytes = b"") -> None:
        """As other factories; it needs no configuration."""

    def enter_forkserver(self) -> None:
        """It uses no library."""

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        raise UnsupportedMediaType(_REFUSAL)

    def process(self, media: Decoded, options: bytes) -> ProcessedItem:
        raise UnsupportedMediaType(_REFUSAL)

    def describe(self, modality: Modality, size: MediaSize, options: bytes) -> Described | None:
        raise UnsupportedMediaType(_REFUSAL)


@dataclass(frozen=True, slots=True)
class AssembledPrompt:
    """Expanded token ids, and one placeholder per feature, in the order of the features. `encoder_token_ids` are as in
    `PreparedPrompt`."""

    token_ids: list[int]
    placeholders: tuple[PlaceholderRange, ...]
    encoder_token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class ImageCost:
    """What an image takes at least: tokens of the prompt, and bytes of large tensors; and how many pixels these have of
    it, with those that a model adds or repeats in tiles. 0 if unknown."""

    num_tokens: int
    num_bytes: int = 0
    num_pixels: int = 0


class Assembler(Protocol):
    """Expands a prompt's placeholders from its items' metadata only: reads neither pixels nor large tensors."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a prompt (vLLM's `max_model_len`)."""
        ...

    @property
    def accepts_item_options(self) -> bool:
        """Whether an item's tokens depend only on its feature, so that items may differ in processor options."""
        ...

    @property
    def predicted(self) -> frozenset[Modality]:
        """The modalities for which an item's header is a function of the media's size and the options, but for some
        sizes or options (`Processor.describe`)."""
        ...

    @property
    def unfit_stages(self) -> Mapping[Modality, StageName]:
        """The stages of prompts with items that get no features, by modality."""
        ...

    def assemble(self, token_ids: list[int], features: tuple[Feature, ...], options: bytes) -> AssembledPrompt:
        """Expand the prompt; `features` are in request order within each modality. Raises PromptRejected."""
        ...

    def place(
        self, token_ids: list[int], features: tuple[Feature, ...], ranges: Sequence[PlaceholderRange]
    ) -> Sequence[PlaceholderRange | None]:
        """Return where the items of an expanded prompt are, whose `ranges` say only offset and length: None for an
        item whose placeholder is not there. Raises InvalidFeature, PromptTooLong."""
        ...

    def image_cost(self, size: tuple[int, int], options: bytes) -> ImageCost | None:
        """Return what an image of this (width, height), in either orientation, takes at least when it is processed with
        `options`; None if that cannot be predicted."""
        ...
