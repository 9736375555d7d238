"""The items that a model is tried with at start: samples of each modality, which its own processor has processed.

Theory of operation. What is known of a family is learned from such items, not from a list of names. Processing takes
most of the time of these trials, so each process does it once, without options, and keeps what is needed of an item:
its header and the shapes of its large tensors.

The shapes of a model's items, learned from these samples.

Theory of operation. Dimensions that differ between the samples may differ between requests; dimensions that are equal
in all of them (patch size, tile size, mel bins) are fixed by the model's weights. Less is known of a field that is
missing from some samples, or of varying rank. A request's own processor options can change either, and vLLM does not
check the result against the model: its encoder then raises inside EngineCore, or returns fewer embeddings than the
prompt has placeholder tokens; either crashes every request. So an item of a request with options must have the
dimensions common to all samples, and no fewer embeddings than tokens. The number that the model itself produces is
derived in one of two ways, whichever the samples confirm:

* in most families each embedding represents a fixed number of elements of the largest field (patches, tiles), or of
  cells of the grids in a field (MiniCPM-V's `tgt_sizes`, whose pixels are padded to the largest slice);
* in the others (padding, cropping, resampling by masks) the processor computes the number from the item's fields and
  size; it must be the same without the options, and so must the item's layout (`check_layout`).

The side of the squares of grid cells that a vision encoder merges into one embedding (`spatial_merge_size`).

Theory of operation. An encoder with a grid of patches fails on one that is not made of whole squares, and with it
EngineCore. Families declare the side in different places of their configuration (`vision_config`, `thinker_config`,
the projector) and by different names, so it is learned: cells of some samples' grids divided by their embeddings. A
family may also merge frames (Ernie: two), so the side is the largest whose square divides that ratio. If the ratio
differs between samples, or a sample's grid is not made of such squares, no side is known: 1.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from math import gcd, isqrt, prod
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
)
from vllm.multimodal.processing.processor import BaseMultiModalProcessor, PromptUpdateDetails

from medialane.types.errors import InvalidFeature, InvalidRequest
from medialane.types.hashing import canonical_options
from medialane.types.media import AudioSamples, Decoded, FrameBatch, Image, MediaSize, Modality
from medialane.types.tensor import TensorSpec
from medialane.vllm_bridge.items.features import decode_item_without_tensors
from medialane.vllm_bridge.items.header_values import MALFORMED_FEATURE, NO_OPTIONS, PlaceholderLayouts
from medialane.vllm_bridge.items.preparation import PREPARATION_ERRORS, VllmProcessor
from medialane.vllm_bridge.seams.multimodal import accepted_modalities
from medialane.vllm_bridge.seams.stand_ins import has_stand_in

logger = logging.getLogger(__name__)

T = TypeVar("T")


def trial_image(width: int, height: int) -> Image:
    return Image(np.full((height, width, 3), 127, np.uint8))


def trial_video(width: int = 64, height: int = 64, num_frames: int = 4) -> FrameBatch:
    """Return a short clip whose frames were all sampled."""
    metadata = {
        "total_num_frames": num_frames,
        "fps": 2.0,
        "duration": num_frames / 2,
        "video_backend": "opencv",
        "frames_indices": list(range(num_frames)),
        "do_sample_frames": False,
    }
    return FrameBatch(np.full((num_frames, height, width, 3), 127, np.uint8), canonical_options(metadata))


def trial_audio(seconds: float = 1.0) -> AudioSamples:
    """Return a tone of 440 Hz at 16 kHz, the sample rate of most models."""
    times = np.arange(int(seconds * 16000), dtype=np.float32) / np.float32(16000)
    return AudioSamples(np.sin(np.float32(2 * np.pi * 440) * times), 16000)


#: The largest last: an image of many tiles, audio longer than the window of Whisper's encoder. One image has odd sides.
SAMPLES: Mapping[Modality, tuple[Decoded, ...]] = {
    "image": (trial_image(64, 64), trial_image(451, 211), trial_image(280, 700), trial_image(1600, 1200)),
    "video": (trial_video(), trial_video(224, 112, 2), trial_video(168, 252, 7)),
    "audio": (trial_audio(), trial_audio(0.4), trial_audio(2.3), trial_audio(31.0)),
}


class TrialItem(NamedTuple):
    """A sample that the model's processor accepts, and its item, without the bytes of large tensors."""

    modality: Modality
    media: Decoded
    header: bytes
    size: MediaSize
    specs: tuple[TensorSpec, ...]


@contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore transformers' warnings about `max_pixels`, the operator's or a trial's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


class TrialItems:
    """The items of one processor. Processes them, which takes a fraction of a second."""

    def __init__(self, processor: BaseMultiModalProcessor) -> None:
        self.layouts = PlaceholderLayouts(processor)
        #: Those samples that the processor accepts: others are longer or larger than it supports, or of a size that it
        #: cannot handle. Empty if it accepts none of a modality; then `refusals` has the last error.
        self.by_modality: dict[Modality, Sequence[TrialItem]] = {}
        self.refusals: dict[Modality, Exception] = {}
        heavy = VllmProcessor(processor)
        for modality in SAMPLES:
            if modality in accepted_modalities(processor):
                self.by_modality[modality] = [*self._accepted(heavy, modality)]

    @without_warnings()
    def _accepted(self, heavy: VllmProcessor, modality: Modality) -> Sequence[TrialItem]:
        accepted = []
        for sample in SAMPLES[modality]:
            made = attempt(heavy.process, sample, NO_OPTIONS)
            if isinstance(made, Exception):
                if not isinstance(made, PREPARATION_ERRORS):
                    logger.info("the model's processor fails with a sample of %s", modality, exc_info=made)
                self.refusals[modality] = made
            else:
                accepted.append(TrialItem(modality, sample, made.header, made.size, made.specs))
        return accepted


def attempt(call: Callable[..., T], *args: object) -> T | Exception:
    """Return the result of a trial, or what it has raised: a family's own code (`--trust-remote-code`) may raise
    anything, and what fails is served in another way. A process without memory does not start: MemoryError passes."""
    try:
        return call(*args)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - as above; the caller reports it
        return error


#: Integer tensors up to this size (grids, sizes, counts) are checked for negative values; pixels are not.
_SMALL_BYTES = 4096

#: Rows of grids: height and width, or time, height and width.
_GRID_DIMS = (2, 3)


#: By dimension, its size if that is fixed; None if their number varies.
Dims = tuple[int | None, ...] | None


class FieldSpec(msgspec.Struct, frozen=True):
    """The properties that a field has in every item that has it; `kind` is how it is batched. `dtypes` is empty if it
    is not always a tensor. In `dims`, a dimension is None if it varies, or may do so in items unlike the samples
    (tiles, rows); in `own_dims`, if it varied between the samples, or counts rows. `numbers` are the least and the
    greatest whole number in the samples (`whole_numbers`)."""

    kind: BaseMultiModalField
    dtypes: frozenset[torch.dtype]
    dims: Dims
    own_dims: Dims
    numbers: tuple[int, int]
    is_optional: bool


class Measure(msgspec.Struct, frozen=True):
    """How an item's number of embeddings is computed: each represents `per_embed` elements of `field`, or cells of its
    grids (products of its rows) if it `has_grids`."""

    field: str
    has_grids: bool
    per_embed: Fraction

    def num_embeds(self, item: MultiModalKwargsItem) -> Fraction:
        return _num_parts(item[self.field].data, has_grids=self.has_grids) / self.per_embed


class ItemShape(msgspec.Struct, frozen=True):
    """The items of one modality. `measure` is None if none holds for every sample: the number of embeddings does not
    follow from the tensors. `has_positions`: the positions of a prompt's tokens follow from its items."""

    fields: dict[str, FieldSpec]
    measure: Measure | None
    has_positions: bool

    def check(self, modality: str, item: MultiModalKwargsItem, *, has_options: bool) -> None:
        """Raise InvalidFeature unless the item's fields match the samples'."""
        required = {name for name, spec in self.fields.items() if not spec.is_optional}
        if not required <= item.keys() <= self.fields.keys():
            raise InvalidFeature(f"{modality}: fields {sorted(item)} instead of {sorted(self.fields)}")
        for name, elem in item.items():
            spec = self.fields[name]
            _check_field(f"{modality} {name}", elem, spec, spec.own_dims if has_options else spec.dims)

    def accepts(self, item: MultiModalKwargsItem, num_embeds: int) -> bool | None:
        """Return whether the model makes this number of embeddings of the item, or more if the positions allow it; None
        if only its processor knows. vLLM counts the tokens of some families without the request's options (Pixtral's
        `size`); it drops embeddings for which there is no token, and fails for want of one."""
        if self.measure is None:
            return None
        made = self.measure.num_embeds(item)
        return num_embeds == made if self.has_positions else num_embeds <= made


def learn_shapes(trial: TrialItems, *, has_positions: bool) -> Mapping[Modality, ItemShape]:
    """Return the shapes of a model's items; none for a modality whose samples cannot be processed."""
    return {
        modality: _learn(trial.layouts, items, has_positions=has_positions)
        for modality, items in trial.by_modality.items()
        if items
    }


def check_layout(modality: Modality, item: MultiModalKwargsItem, default: MultiModalKwargsItem) -> None:
    """Raise InvalidRequest unless an item has the layout of `default`, the same without the request's options: all that
    an encoder may depend on besides the content. That is its shapes, and its whole numbers (counts, grids, masks)."""
    given, expected = ({name: _layout(elem.data) for name, elem in one.items()} for one in (item, default))
    changed = sorted(name for name in given.keys() | expected.keys() if given.get(name) != expected.get(name))
    if changed:
        message = f"these options change {', '.join(changed)} of the {modality}, which this model does not support"
        raise InvalidRequest(message, param="mm_processor_kwargs")


def _layout(data: Any) -> object:
    if isinstance(data, torch.Tensor):
        has_numbers = not (data.is_floating_point() or data.is_complex() or data.dtype == torch.uint8)
        return tuple(data.shape), data.numpy().tobytes() if has_numbers and not has_stand_in(data) else None
    if isinstance(data, list | tuple):
        return [_layout(one) for one in data]
    return data if isinstance(data, int | str) else type(data)


def num_embeds(content: PromptUpdateDetails) -> int:
    """Return how many tokens of a placeholder are replaced by an embedding."""
    return len(content.full) if content.is_embed is None else int(content.is_embed(content.full).sum())


def _learn(layouts: PlaceholderLayouts, made: Sequence[TrialItem], *, has_positions: bool) -> ItemShape:
    items = [decode_item_without_tensors(one.header) for one in made]
    by_name = {name: [item[name] for item in items if name in item] for item in items for name in item}
    fields = {name: _common(elems, is_optional=len(elems) < len(items)) for name, elems in by_name.items()}
    try:
        counts = [_num_embeds_of(layouts, item) for item in made]
        measure = next(_measures(by_name, counts), None)
    except MALFORMED_FEATURE:
        measure = None
    return ItemShape(fields, measure, has_positions)


def _measures(by_name: Mapping[str, Sequence[MultiModalFieldElem]], counts: Sequence[int]) -> Iterator[Measure]:
    """Yield what holds for all samples, which have these numbers of embeddings, first by the elements of the largest
    field. Grids are no proof if the numbers are all the same."""
    largest = max(by_name, key=lambda name: _num_bytes(by_name[name][0]), default="")
    grids = [name for name, elems in by_name.items() if all(_has_grids(elem.data) for elem in elems)]
    for name, has_grids in ((largest, False), *((name, True) for name in grids if len(set(counts)) > 1)):
        elems = by_name.get(name, ())
        if len(elems) == len(counts) and all(counts):
            sizes = [_num_parts(elem.data, has_grids=has_grids) for elem in elems]
            ratios = {Fraction(size, count) for size, count in zip(sizes, counts, strict=True)}
            if len(ratios) == 1:
                yield Measure(name, has_grids, ratios.pop())


def _has_grids(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and value.ndim == 2
        and value.shape[-1] in _GRID_DIMS
        and not has_stand_in(value)
    )


def _num_parts(value: Any, *, has_grids: bool) -> int:
    return int(value.prod(-1).sum()) if has_grids else int(value.numel())


def _num_embeds_of(layouts: PlaceholderLayouts, item: TrialItem) -> int:
    return num_embeds(layouts.find([item], NO_OPTIONS).updates[item.modality][0][0].content)


def _num_bytes(elem: MultiModalFieldElem) -> int:
    return elem.data.nbytes if isinstance(elem.data, torch.Tensor) else 0


def _common(elems: Sequence[MultiModalFieldElem], *, is_optional: bool) -> FieldSpec:
    values = [elem.data for elem in elems]
    field = elems[0].field
    ranges = [(least, greatest) for least, greatest in map(whole_numbers, values) if least <= greatest]
    numbers = (min(ranges)[0], max(greatest for _, greatest in ranges)) if ranges else (0, -1)
    if not all(isinstance(v, torch.Tensor) for v in values):
        return FieldSpec(field, frozenset(), None, None, numbers, is_optional)
    own = _common_dims(values)
    dims: Dims = None if own is None else (None,) * len(own)
    if isinstance(field, MultiModalFlatField) and own:  # the other fields determine the number of rows
        row = field.dim % len(own)
        dims = own = (*own[:row], None, *own[row + 1 :])
    return FieldSpec(field, frozenset(v.dtype for v in values), dims, own, numbers, is_optional)


def whole_numbers(data: Any) -> tuple[int, int]:
    """Return the least and the greatest whole number; an empty range for pixels, fractions, and unknown values."""
    if isinstance(data, int):
        return int(data), int(data)
    has_numbers = isinstance(data, torch.Tensor) and data.numel() and data.dtype != torch.uint8
    if not has_numbers or data.is_floating_point() or data.is_complex() or has_stand_in(data):
        return 0, -1
    values = data.numpy()  # torch has no minimum of some unsigned dtypes
    return int(values.min()), int(values.max())


def _common_dims(values: Sequence[torch.Tensor]) -> Dims:
    if len({v.ndim for v in values}) != 1:
        return None
    return tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*(v.shape for v in values), strict=True))


def _check_field(name: str, elem: MultiModalFieldElem, spec: FieldSpec, dims: Dims) -> None:
    if not spec.dtypes:
        return
    data: Any = elem.data
    if not isinstance(data, torch.Tensor) or data.dtype not in spec.dtypes:
        expected = " or ".join(sorted(map(str, spec.dtypes)))
        raise InvalidFeature(f"{name}: {getattr(data, 'dtype', type(data).__name__)} instead of {expected}")
    if dims is not None:
        _check_dims(name, data.shape, dims)
    counts_something = 0 <= spec.numbers[0] <= spec.numbers[1]
    if counts_something and data.nbytes <= _SMALL_BYTES and whole_numbers(data)[0] < 0:
        raise InvalidFeature(f"{name}: a negative number")


def _check_dims(name: str, shape: Sequence[int], dims: Sequence[int | None]) -> None:
    if len(shape) != len(dims):
        raise InvalidFeature(f"{name}: {len(shape)} dimensions instead of {len(dims)}")
    if any(expected not in (None, size) for expected, size in zip(dims, shape, strict=True)):
        raise InvalidFeature(f"{name}: shape {tuple(shape)} instead of {tuple(dims)}")


#: Names of fields of grids end so, in all families of vLLM 0.32 that count embeddings by them. A grid is (frames, rows,
#: columns) or (rows, columns); an item may have several, one for each segment of a video.
_SUFFIXES = ("grid_thw", "grid_thws", "grid_hw", "grid_hws")


#: Well above the 8 cells (2x2, of two frames) of the family that merges most.
_MAX_CELLS_PER_EMBED = 64


class GridSample(NamedTuple):
    """The grids of a sample, and the number of its embeddings."""

    grids: Sequence[Sequence[int]]
    num_embeds: int

    @property
    def cells_per_embed(self) -> Fraction:
        cells = sum(rows * columns * (frames[0] if frames else 1) for *frames, rows, columns in self.grids)
        return Fraction(cells, self.num_embeds)


def learn_merge_size(trial: TrialItems) -> int:
    """Return the side; 1 if the family has no grid, or none can be learned."""
    sides = [common_side([*_samples(trial.layouts, items)]) for items in trial.by_modality.values()]
    return gcd(*[side for side in sides if side is not None]) or 1


def check_grids(modality: str, item: MultiModalKwargsItem, merge: int) -> None:
    """Raise InvalidFeature unless the item's grids consist of whole squares of this side."""
    for name, elem in item.items():
        if name.endswith(_SUFFIXES):
            grids = _grids_in(name, elem.data)
            several = len(grids) > 1 and not isinstance(elem.field, MultiModalFlatField)
            if not grids or several or any(min(grid) < 1 or any(side % merge for side in grid[-2:]) for grid in grids):
                value = elem.data.tolist() if isinstance(elem.data, torch.Tensor) else type(elem.data).__name__
                raise InvalidFeature(f"{modality} {name}: {value} is not a grid of {merge}x{merge} squares")


def min_embeds(item: MultiModalKwargsItem) -> int:
    """Return the fewest embeddings that an item with such grids has in any family; 0 without a grid."""
    grids = [grid for name, elem in item.items() if name.endswith(_SUFFIXES) for grid in _grids_in(name, elem.data)]
    return sum(map(prod, grids)) // _MAX_CELLS_PER_EMBED


def common_side(samples: Sequence[GridSample]) -> int | None:
    """Return the side that all samples of one modality have in common; None if they do not show it."""
    ratios = {sample.cells_per_embed for sample in samples}
    if len(ratios) != 1 or (ratio := ratios.pop()).denominator != 1:
        return None
    side = next(n for n in range(isqrt(int(ratio)), 0, -1) if int(ratio) % n**2 == 0)
    is_whole = all(cells % side == 0 for sample in samples for grid in sample.grids for cells in grid[-2:])
    return side if is_whole else None


def _samples(layouts: PlaceholderLayouts, items: Sequence[TrialItem]) -> Iterator[GridSample]:
    """Yield the grids of items whose placeholder can be computed."""
    for item in items:
        fields = decode_item_without_tensors(item.header).items()
        grids = [grid for name, elem in fields if name.endswith(_SUFFIXES) for grid in _grids_in(name, elem.data)]
        if grids:
            with suppress(*MALFORMED_FEATURE):
                if count := _num_embeds_of(layouts, item):
                    yield GridSample(grids, count)


def _grids_in(name: str, data: Any) -> list[list[int]]:
    """Return the grids of one field; none if it has another form than its name says."""
    numbers = 2 if name.rstrip("s").endswith("_hw") else 3
    if not isinstance(data, torch.Tensor) or data.is_floating_point() or data.numel() % numbers:
        return []
    return [[int(n) for n in row] for row in data.reshape(-1, numbers).tolist()]
