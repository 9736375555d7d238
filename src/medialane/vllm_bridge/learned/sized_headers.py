"""Headers of unprocessed items: in most families they are functions of the media's size.

Theory of operation. A header has the shapes of an item's large tensors, and the values of its small ones: grids,
counts, masks. Whether these depend on the content of the media is declared nowhere, so it is found out at start: a
sample of each of several sizes is processed again as noise, and in some sizes as a blank. If all headers of a size are
equal, a blank's is as good as any. Fields whose values differ have content; they are in the header if they are
small enough (the pixels of an icon), so headers of such sizes are not predicted. What a request's own options change
is not known from the samples: with options, a blank and noise of the very size must have the same header.

Predicts from an image's size what it takes at least: tokens of the prompt, and bytes of tensors.

Theory of operation. Most of vLLM's families can compute the tokens (`get_num_image_tokens` of their processing info),
from arguments that differ between families; if a family needs one that is not known here, there is no prediction. It is
used only after it has been compared with the placeholders of some processed images: a family may return an upper bound,
or omit the tokens between rows. Too few is safe, since the complete prompt is checked again; too many is not. Bytes are
predicted if those images have an equal number of them per token, as in families whose tensors are patches.

Limits of the pixels per item: clients may request fewer than the operator allows, never more.

Some families (Qwen-VL and its successors) scale an image until its number of pixels is between two limits, vLLM's
`min_pixels` and `max_pixels`. Other families have none: an item's options are then ignored, as in vLLM.

Theory of operation. A processor that declares `max_pixels` may still have the limit somewhere else, in another unit
(`longest_edge` counts pixels in some families, and is a side in others). So the declared limit is tried with a sample:
given as an option, it must change nothing, or no more than a limit that is far larger than the sample. (Qwen-Omni has
other defaults for videos, which any such option replaces.)

vLLM applies a request's options to all of its items; medialane also has pixel limits of single items, applied when an
item is processed. The prompt is then expanded without them: that is right only if the family derives an item's tokens
from its feature (a grid), not from its size and the options (`accepts_item_options`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any, assert_never

import numpy as np
from transformers.image_utils import SizeDict
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.prepare.processor import Described, ImageCost, ProcessedItem
from medialane.types.feature import MediaPayload
from medialane.types.hashing import canonical_options
from medialane.types.media import AudioSamples, Decoded, FrameBatch, Image, MediaSize, Modality
from medialane.vllm_bridge.items.features import large_tensors, small_values, without_values
from medialane.vllm_bridge.items.header_values import NO_OPTIONS, PlaceholderLayouts, PlaceholderSource, decode_options
from medialane.vllm_bridge.items.preparation import PREPARATION_ERRORS, VllmProcessor
from medialane.vllm_bridge.learned.item_shape import TrialItem, TrialItems, attempt, without_warnings
from medialane.vllm_bridge.seams.multimodal import accepted_modalities, hf_processor_of

logger = logging.getLogger(__name__)

#: (width, height)
Size = tuple[int, int]

#: Options that every family that has them takes into account. With others (`do_resize`) the count may be wrong.
_COUNTED_BY = {"min_pixels", "max_pixels", "size"}

#: Values of a pixel.
_CHANNELS = 3


class ImageTokens:
    """Predictions of one processor, confirmed by some images that it has processed."""

    def __init__(self, processor: BaseMultiModalProcessor, trial: TrialItems) -> None:
        self._processor = processor
        ratios = self._ratios(trial)
        #: Whether there are predictions.
        self.is_trusted = bool(ratios)
        self._num_bytes, self._num_pixels = ratios[0] if len(set(ratios)) == 1 else (Fraction(0), Fraction(0))

    def _ratios(self, trial: TrialItems) -> Sequence[tuple[Fraction, Fraction]]:
        """Return bytes and pixels of large tensors per predicted token of each image; none unless every prediction is
        confirmed."""
        ratios = attempt(lambda: [self._ratio_of(item, trial.layouts) for item in trial.by_modality.get("image", ())])
        if isinstance(ratios, Exception):
            logger.warning("images are not rejected by size: their token count cannot be predicted", exc_info=ratios)
            return ()
        return [ratio for ratio in ratios if ratio is not None] if None not in ratios else ()

    def cost(self, size: Size, options: bytes) -> ImageCost | None:
        """Return what an image of this size takes at least; None if there is no prediction. Takes 0.2 to 0.4 ms, and 10
        ms for new options, most of it in vLLM's and transformers' handling of options."""
        num_tokens = self.min_tokens(size, options) if self.is_trusted else None
        if num_tokens is None:
            return None
        return ImageCost(num_tokens, int(num_tokens * self._num_bytes), int(num_tokens * self._num_pixels))

    def min_tokens(self, size: Size, options: bytes) -> int | None:
        """Return the tokens of an image of this size or rotated by 90 degrees (EXIF orientation is unknown here),
        whichever is fewer; None if there is no prediction."""
        given = decode_options(options)
        if not _COUNTED_BY.issuperset(given):
            return None
        try:
            counts = [self._count(sides, given) for sides in (size, size[::-1])]
        except PREPARATION_ERRORS:  # a family's own code with an untrusted size: its processor decides
            logger.debug("the model's processor cannot predict the tokens of an image of %s", size, exc_info=True)
            return None
        return min((count for count in counts if count is not None), default=None)

    def _count(self, size: Size, options: dict[str, object]) -> int | None:
        info = self._processor.info
        count = getattr(info, "get_num_image_tokens", None)  # not all families have it
        if count is None:
            return None
        arguments: dict[str, Callable[[], Any]] = {
            "image_width": lambda: size[0],
            "image_height": lambda: size[1],
            "mm_kwargs": lambda: options,
            "processor": lambda: info.get_hf_processor(**options),
            "image_processor": lambda: info.get_hf_processor(**options).image_processor,
        }
        parameters = inspect.signature(count).parameters.values()
        if any(p.name not in arguments and p.default is p.empty for p in parameters):
            return None
        return int(count(**{p.name: arguments[p.name]() for p in parameters if p.name in arguments}))

    def _ratio_of(self, item: TrialItem, layouts: PlaceholderLayouts) -> tuple[Fraction, Fraction] | None:
        """Return bytes and pixels of the item's large tensors per predicted token; None if the prediction is not
        confirmed."""
        predicted = self.min_tokens((item.size.width, item.size.height), NO_OPTIONS)
        if predicted is None:
            return None
        (updates,) = layouts.find([item], NO_OPTIONS).updates["image"]
        if predicted > min(len(update.content.full) for update in updates):
            return None
        # Qwen-VL and its successors repeat an image as the frames of their patches.
        repeats = getattr(getattr(hf_processor_of(self._processor), "image_processor", None), "temporal_patch_size", 1)
        num_values = sum(prod(spec.shape) for spec in item.specs)
        per_token = Fraction(1, predicted)
        return sum(spec.nbytes for spec in item.specs) * per_token, num_values * per_token / (_CHANNELS * repeats)


_PROCESSORS: tuple[tuple[Modality, str], ...] = (("image", "image_processor"), ("video", "video_processor"))

#: No sample has as many.
_FAR_PIXELS = 1 << 26


def learn_max_pixels(processor: BaseMultiModalProcessor, trial: TrialItems) -> Mapping[Modality, int]:
    """Return the operator's `max_pixels` (`--mm-processor-kwargs`), or else the model's own; empty if it has none."""
    accepted = accepted_modalities(processor)
    hf_processor = hf_processor_of(processor)
    # Only families with image support have an image processor; it declares whether it has pixel limits.
    image_processor = getattr(hf_processor, "image_processor", None) if "image" in accepted else None
    declared = getattr(image_processor, "valid_kwargs", None)
    if "max_pixels" not in getattr(declared, "__annotations__", {}):
        return {}
    operators = processor.info.ctx.get_merged_mm_kwargs({})
    limits = {m: declared_limit(m, getattr(hf_processor, name, None), operators) for m, name in _PROCESSORS}
    return {
        modality: limit
        for modality, limit in limits.items()
        if limit is not None
        and (items := trial.by_modality.get(modality))
        and is_pixel_limit(processor, items[-1], limit)
    }


def declared_limit(modality: Modality, part: Any, operators: Mapping[str, Any]) -> int | None:
    """Return the limit that the operator's options or a Hugging Face processor (None if the family has none) declare
    for items of this modality."""
    if part is None:
        return None
    own = operators.get(f"{modality}s_kwargs")
    settings = {name: getattr(part, name, None) for name in ("max_pixels", "size")}
    candidates = (own if isinstance(own, Mapping) else {}, operators, settings)
    return next((limit for options in candidates for limit in _limits(options)), None)


def _limits(options: Mapping[str, Any]) -> Iterator[int]:
    """Yield the limits in `options`; these families call it `longest_edge` in their files, though it counts pixels. A
    `size` may also be missing, a number, or the two sides."""
    size = options.get("size")
    sides = dict(size) if isinstance(size, Mapping | SizeDict) else {}
    for value in (options.get("max_pixels"), sides.get("max_pixels"), sides.get("longest_edge")):
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1:
            yield int(value)


@without_warnings()
def is_pixel_limit(processor: BaseMultiModalProcessor, item: TrialItem, limit: int) -> bool:
    """Return whether the processor makes the same of a sample with `limit` as its `max_pixels` as without a limit."""
    heavy = VllmProcessor(processor)
    try:
        given = heavy.process(item.media, canonical_options({"max_pixels": limit})).specs
        far = canonical_options({"max_pixels": _FAR_PIXELS})
        is_limit = given == item.specs or given == heavy.process(item.media, far).specs
    except PREPARATION_ERRORS as error:
        logger.warning(
            "max_pixels and min_pixels of %ss are ignored: the processor refuses them: %r", item.modality, error
        )
        return False
    if not is_limit:
        message = "max_pixels and min_pixels of %ss are ignored: %d is not the number of pixels that it looks like"
        logger.warning(message, item.modality, limit)
    return is_limit


def learn_accepts_item_options(
    processor: BaseMultiModalProcessor, trial: TrialItems, max_pixels: Mapping[Modality, int]
) -> bool:
    """Return whether an item's tokens are the same with and without the options with which it was processed, for all
    modalities with pixel limits. False if there is none."""
    follow = []
    for modality, limit in max_pixels.items():
        try:
            follow.append(_tokens_follow_feature(processor, trial.by_modality[modality][-1], limit))
        except PREPARATION_ERRORS as error:
            logger.info("pixel limits of single %ss are not accepted: %r", modality, error.__cause__ or error)
        else:
            if not follow[-1]:
                logger.info("pixel limits of single %ss are not accepted: their tokens do not follow them", modality)
    return bool(follow) and all(follow)


@without_warnings()
def _tokens_follow_feature(processor: BaseMultiModalProcessor, item: TrialItem, limit: int) -> bool:
    layouts = PlaceholderLayouts(processor)

    def tokens(source: PlaceholderSource, options: bytes) -> list[list[int]]:
        (updates,) = layouts.find([source], options).updates[item.modality]
        return [list(update.content.full) for update in updates]

    # A quarter of an image's pixels, or of a frame's; some families count all frames'.
    fewer = min(limit, item.size.width * item.size.height) // 4
    options = canonical_options({"min_pixels": min(4096, fewer), "max_pixels": fewer})
    made = VllmProcessor(processor).process(item.media, options)
    lower = MediaPayload(item.modality, "", made.header, (), made.size)
    return tokens(lower, NO_OPTIONS) == tokens(lower, options) != tokens(item, NO_OPTIONS)


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
    if modality == "image":
        return Image(np.zeros(frame, np.uint8))
    assert_never(modality)


def noise(modality: Modality, size: MediaSize) -> Decoded:
    """Return media of this size that are random, but always the same."""
    made, random = blank(modality, size), np.random.default_rng(1)
    if isinstance(made, AudioSamples):
        made.samples[:] = random.random(made.samples.shape, np.float32) - np.float32(0.5)
    else:
        made.array[:] = np.frombuffer(random.bytes(made.array.nbytes), np.uint8).reshape(made.array.shape)
    return made


def described(
    process: Process, modality: Modality, size: MediaSize, options: bytes, *, content: frozenset[str]
) -> Described | None:
    """Return what items of this size have in common (`prepare.Processor.describe`), whose `content` fields depend on
    more than that; None if one of these is in the header, or the options make it depend on the content."""
    item = process(blank(modality, size), options)
    if not content.isdisjoint(small_values(item.header)):
        return None
    if options != NO_OPTIONS and process(noise(modality, size), options).header != item.header:
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
