"""Headers of items that nobody has processed: in most families they are functions of the media's size.

Theory of operation. A header has the shapes of an item's large tensors, and the values of its small ones: grids,
counts, masks. Whether these depend on the content of the media is declared nowhere, so it is found out at start: a
sample of each of several sizes is processed again as noise, and in some sizes as a blank. If all headers of a size are
equal, that of a blank is as good as any. Fields whose values differ have content; they are in the header if they are
small enough (the pixels of an icon), so headers of such sizes are not predicted. What a request's own options change
is not known from the samples: with options, a blank and noise of the very size must have the same header.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from medialane.prepare.processor import Described, ProcessedItem
from medialane.types.media import AudioSamples, Decoded, FrameBatch, Image, MediaSize, Modality
from medialane.vllm_bridge.items.features import large_tensors, small_values, without_values
from medialane.vllm_bridge.items.header_values import NO_OPTIONS
from medialane.vllm_bridge.items.trial_items import TrialItem, attempt, without_warnings

logger = logging.getLogger(__name__)

Process = Callable[[Decoded, bytes], ProcessedItem]

#: The first samples, the smallest, are also processed as blanks.
_NUM_BLANKS = 2


def blank(modality: Modality, size: MediaSize) -> Decoded:
    """Return media of this size that are black or silent. Their memory is not touched before they are read."""
    if modality == "audio":
        return AudioSamples(np.zeros(size.num_samples, np.float32), size.sample_rate)
    frame = (size.height, size.width, 3)
    if modality == "video":
        return FrameBatch(np.zeros((size.num_frames, *frame), np.uint8), size.metadata)
    return Image(np.zeros(frame, np.uint8))


def noise(modality: Modality, size: MediaSize) -> Decoded:
    """Return media of this size that are random, but always the same."""
    made, random = blank(modality, size), np.random.default_rng(1)
    if isinstance(made, AudioSamples):
        made.samples[:] = random.random(made.samples.shape, np.float32) - np.float32(0.5)
    else:
        made.array[:] = np.frombuffer(random.bytes(made.array.nbytes), np.uint8).reshape(made.array.shape)
    return made


class SizedHeaders:
    """Headers by size, of one processor. `process` runs it."""

    def __init__(self, process: Process, content_fields: Mapping[Modality, frozenset[str]]) -> None:
        self._process = process
        self._content_fields = content_fields

    def describe(self, modality: Modality, size: MediaSize, options: bytes) -> Described | None:
        """See `prepare.Processor.describe`."""
        content = self._content_fields.get(modality)
        if content is None:
            return None
        item = self._process(blank(modality, size), options)
        if not content.isdisjoint(small_values(item.header)):
            return None
        if options != NO_OPTIONS and self._process(noise(modality, size), options).header != item.header:
            return None
        return Described(item.header, item.size)


@without_warnings()
def learn_content_fields(
    process: Process, samples: Mapping[Modality, Sequence[TrialItem]]
) -> Mapping[Modality, frozenset[str]]:
    """Return the fields with content of an item, by the modalities whose headers are functions of the media's size
    otherwise. Takes as long as the samples have taken."""
    learned = {}
    for modality, items in samples.items():
        fields = attempt(_content_fields, process, items)
        if isinstance(fields, Exception):
            logger.info("headers of %ss are not predicted: noise cannot be processed", modality, exc_info=fields)
        elif fields is None:
            logger.info("headers of %ss are not predicted: they depend on the content of the media", modality)
        else:
            learned[modality] = fields
    return learned


def _content_fields(process: Process, items: Sequence[TrialItem]) -> frozenset[str] | None:
    """Return the fields whose values differ between media of one size; None if headers differ otherwise, or if there is
    no sample with all of these fields outside its header."""
    content: set[str] = set()
    for index, sample in enumerate(items):
        size = sample.media.size
        made = process(noise(sample.modality, size), NO_OPTIONS)
        headers = [sample.header, made.header]
        if index < _NUM_BLANKS:
            silent = process(blank(sample.modality, size), NO_OPTIONS)
            headers.append(silent.header)
            content.update(_differing_tensors(made, silent))
        values = [small_values(header) for header in headers]
        content.update(name for one in values[1:] for name in values[0] if one.get(name) != values[0][name])
        if len({without_values(header, content) for header in headers}) > 1:
            return None
    is_predicted = bool(items) and content.isdisjoint(small_values(items[-1].header))
    return frozenset(content) if is_predicted else None


def _differing_tensors(one: ProcessedItem, other: ProcessedItem) -> Iterator[str]:
    """Yield the fields whose large tensors differ."""
    theirs = large_tensors(other.header)
    for name, indices in large_tensors(one.header).items():
        if indices != theirs.get(name) or any(one.buffers[n] != other.buffers[n] for n in indices):
            yield name
