"""The tensors of an item as others make them: plain vLLM from the encoded file, Hugging Face's processor as a trainer.

Theory of operation. Plain vLLM loads the file by its own connector and processes a whole request with this item. A
trainer passes Hugging Face's processor the image as Pillow opens it, whatever its mode. Which frames of a video are
sampled and how audio is resampled is decided by whoever loads the file, so of these Hugging Face gets what vLLM passes
to its processor: frames with their metadata, samples at the model's rate. Its arguments are named in several ways;
they are tried in turn.

Compares the fields of one item between Hugging Face's processor, plain vLLM's and ours.

Theory of operation. Values are compared as flat lists of tensors, since processors nest them in lists. Hugging Face
returns a batch of one item, so a first dimension of 1 that the other has not is ignored. vLLM converts floats to the
model's dtype, so floats of different dtypes are compared in the smaller one. Where vLLM leaves normalisation to the
device, its pixels are normalised here as there, before they are compared with normalised ones.
"""

from __future__ import annotations

import io
import logging
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, get_args

import torch
from PIL import Image as PILImage
from transformers import AutoProcessor, PreTrainedTokenizerBase
from vllm.config import ModelConfig
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.types.errors import FeatureUnsupported
from medialane.types.media import Decoded, Modality
from medialane.types.tensor import Comparison, FieldComparison, PixelNormalisation, Relation
from medialane.vllm_bridge.items.mistral_chat import expand_marks
from medialane.vllm_bridge.items.preparation import engine_media
from medialane.vllm_bridge.learned.item_shape import attempt, without_warnings
from medialane.vllm_bridge.learned.model_profile import process_one
from medialane.vllm_bridge.seams.multimodal import load_as_plain

logger = logging.getLogger(__name__)

#: What transformers knows of a video's metadata.
_METADATA = ("total_num_frames", "fps", "width", "height", "duration", "video_backend", "frames_indices")


class PlainVllm:
    """Processes files as plain vLLM does. `processor` is a new one of the model."""

    def __init__(self, model_config: ModelConfig, processor: BaseMultiModalProcessor) -> None:
        self._config = model_config
        self._processor = processor
        expand_marks(processor)

    def load(self, modality: Modality, data: bytes) -> Any:
        """Return what vLLM's connector makes of a file."""
        return load_as_plain(self._config, modality, f"data:;base64,{b64encode(data).decode()}")

    def process(self, modality: Modality, loaded: Any) -> Mapping[str, Any]:
        """Return the fields of the item, by name."""
        (item,) = process_one(self._processor, modality, loaded)["mm_kwargs"][modality]
        return {name: elem.data for name, elem in item.items()}

    def process_decoded(self, media: Decoded) -> Mapping[str, Any]:
        """Return the fields of an item that we have decoded, as a worker makes them (stage `decoded`)."""
        return self.process(media.modality, engine_media(media))


class HuggingFace:
    """The processor that `AutoProcessor` loads for the model. `processor` is vLLM's."""

    def __init__(self, model_config: ModelConfig, processor: BaseMultiModalProcessor) -> None:
        self._config = model_config
        self._processor = processor

    @cached_property
    def own(self) -> Any:
        """Hugging Face's processor. Raises what `AutoProcessor` raises, such as for a model that has none."""
        config = self._config
        options = config.multimodal_config.mm_processor_kwargs or {}
        loaded = AutoProcessor.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code, **options
        )
        if isinstance(loaded, PreTrainedTokenizerBase):
            raise FeatureUnsupported("for this model AutoProcessor has a tokenizer only")
        return loaded

    @without_warnings()
    def process(self, modality: Modality, data: bytes, loaded: Any) -> Mapping[str, Any]:
        """Return the fields of the item, by name. `loaded` is what vLLM has made of the file. Raises the first error if
        the processor accepts it in no form."""
        errors = []
        for media in self._media(modality, data, loaded):
            for text in self._texts(modality):
                made = attempt(self._call, {**text, **media})
                if not isinstance(made, Exception):
                    return made
                errors.append(made)
        raise errors[0]

    def _call(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return dict(self.own(**arguments, return_tensors="pt"))

    def _media(self, modality: Modality, data: bytes, loaded: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the arguments for the item, the best first."""
        if modality == "image":
            yield {"images": [PILImage.open(io.BytesIO(data))]}
            return
        parsed = self._processor.info.parse_mm_data({modality: [loaded]})[modality].get(0)
        if modality == "audio":
            rate = _sampling_rate(self.own)
            yield {"audio": [parsed], **rate}
            yield {"audio": parsed, **rate}
            yield {"audios": [parsed], **rate}
            return
        frames, metadata = parsed if isinstance(parsed, tuple) else (parsed, {})
        known = {name: metadata[name] for name in _METADATA if metadata.get(name) is not None}
        yield {"videos": [frames], "video_metadata": [known], "do_sample_frames": False}
        yield {"videos": [frames], "do_sample_frames": False}
        yield {"videos": [frames]}

    def _texts(self, modality: Modality) -> Iterator[Mapping[str, Any]]:
        """Yield the argument for a text with the item's placeholder: vLLM's, the chat template's, none."""
        makers: tuple[Callable[[], str], ...] = (
            lambda: self._processor.dummy_inputs.get_dummy_text({modality: 1}),
            lambda: self.own.apply_chat_template([{"role": "user", "content": [{"type": modality}]}]),
        )
        for make in makers:
            text = attempt(make)
            if isinstance(text, str) and text:
                yield {"text": [text]}
        yield {}


def _sampling_rate(processor: Any) -> Mapping[str, int]:
    rate = getattr(getattr(processor, "feature_extractor", None), "sampling_rate", None)
    return {} if rate is None else {"sampling_rate": rate}


#: A field's value: tensors and scalars, in nested lists.
Values = Mapping[str, Any]

#: What Hugging Face's processors make of the text.
_OF_TEXT = frozenset(("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"))

#: Normalising takes some roundings of float32 in another order: 5e-7 for values of about 2.
_ROUNDING = 1e-5

_SEVERITY = {relation: number for number, relation in enumerate(get_args(Relation))}

_MAX_FORM_CHARS = 100


def compare_fields(
    plain: Values, ours: Values, hugging_face: Values | None, normalisation: PixelNormalisation | None
) -> tuple[FieldComparison, ...]:
    """Compare all fields of an item, plain vLLM's first. `normalisation` is the device's; None if there is
    none."""
    theirs = (
        {}
        if hugging_face is None
        else {name: value for name, value in hugging_face.items() if name in plain or name not in _OF_TEXT}
    )
    return tuple(
        FieldComparison(
            name=name,
            plain=_form(plain, name),
            ours=_form(ours, name),
            hugging_face=_form(theirs, name),
            of_ours=_compare(plain, ours, name, normalisation),
            of_hugging_face=None if hugging_face is None else _compare(plain, theirs, name, normalisation),
        )
        for name in dict.fromkeys((*plain, *ours, *theirs))
    )


def _compare(plain: Values, other: Values, name: str, normalisation: PixelNormalisation | None) -> Comparison:
    if name not in plain and name not in other:
        return Comparison("equal")
    if name not in plain or name not in other:
        return Comparison("missing")
    ones, others = list(_leaves(plain[name])), list(_leaves(other[name]))
    if len(ones) != len(others):
        ones, others = _joined(ones), _joined(others)
    if len(ones) != len(others):
        return Comparison("shape")
    compared = [_compare_leaves(*pair, normalisation) for pair in zip(ones, others, strict=True)]
    relations: list[Relation] = [one.relation for one in compared] or ["equal"]
    relation = max(relations, key=_SEVERITY.__getitem__)
    return Comparison(relation, max((one.largest for one in compared), default=0.0))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _joined(leaves: list[Any]) -> list[Any]:
    """Return equal tensors of a list as one, as a processor that stacks them returns them."""
    shapes = {one.shape if isinstance(one, torch.Tensor) else None for one in leaves}
    return [torch.stack(leaves)] if len(leaves) > 1 and len(shapes) == 1 and None not in shapes else leaves


def _compare_leaves(plain: Any, other: Any, normalisation: PixelNormalisation | None) -> Comparison:
    if not isinstance(plain, torch.Tensor) and not isinstance(other, torch.Tensor):
        return Comparison("equal" if plain == other else "differs")
    try:
        one, two = torch.as_tensor(plain), torch.as_tensor(other)
    except (TypeError, ValueError, RuntimeError):  # a string beside a tensor
        return Comparison("differs")
    if one.shape != two.shape:
        one, two = _without_batch(one, two)
    if one.shape != two.shape:
        return Comparison("shape")
    if one.dtype == two.dtype:
        return _differing(one, two, "equal")
    raw, done = (one, two) if one.dtype == torch.uint8 else (two, one)
    if normalisation is not None and raw.dtype == torch.uint8 and done.is_floating_point():
        return _normalised(raw, done, normalisation)
    return _differing(*_in_smaller(one, two), "cast")


def _without_batch(one: torch.Tensor, two: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if two.ndim == one.ndim + 1 and two.shape[0] == 1:
        return one, two[0]
    if one.ndim == two.ndim + 1 and one.shape[0] == 1:
        return one[0], two
    return one, two


def _in_smaller(one: torch.Tensor, two: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both in the dtype of fewer bits, if both are floats; in that which both have in common otherwise."""
    if one.is_floating_point() and two.is_floating_point():
        dtype = min(one.dtype, two.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    else:
        dtype = torch.promote_types(one.dtype, two.dtype)
    return one.to(dtype), two.to(dtype)


def _differing(one: torch.Tensor, two: torch.Tensor, if_equal: Relation) -> Comparison:
    if torch.equal(one, two) or (one.is_floating_point() and torch.allclose(one, two, 0, 0, equal_nan=True)):
        return Comparison(if_equal)
    distance = (one.to(torch.float64) - two.to(torch.float64)).abs().nan_to_num(torch.inf)
    return Comparison("differs", float(distance.max()))


def _normalised(raw: torch.Tensor, done: torch.Tensor, normalisation: PixelNormalisation) -> Comparison:
    expected = normalise(raw, normalisation)
    if expected is None:
        return Comparison("differs")
    made = done.to(torch.float32)
    largest = float((expected - made).abs().max()) if made.numel() else 0.0
    is_equal = largest <= _ROUNDING or torch.equal(expected.to(done.dtype), done)
    return Comparison("normalised" if is_equal else "differs", largest)


def normalise(pixels: torch.Tensor, normalisation: PixelNormalisation) -> torch.Tensor | None:
    """Return raw pixels as vLLM's device has them after `FusedMMInputNorm`, in float32: of patches (rows of channels
    one after another) or of images (channels, rows, columns). None if there is no dimension of channels."""
    channels = len(normalisation.mean)
    if pixels.ndim == 2 and pixels.shape[1] % channels == 0:
        by_channel = pixels.reshape(pixels.shape[0], channels, -1, 1)
    elif pixels.ndim > 2 and pixels.shape[-3] == channels:
        by_channel = pixels
    else:
        return None
    std, mean = (
        torch.tensor(one, dtype=torch.float32).view(channels, 1, 1) for one in (normalisation.std, normalisation.mean)
    )
    return (by_channel * (normalisation.rescale_factor / std) - mean / std).reshape(pixels.shape)


def _form(values: Values, name: str) -> str:
    """Return dtype and shape of a field in a few words; empty if it is missing."""
    if name not in values:
        return ""
    leaves = list(_leaves(values[name]))
    forms = dict.fromkeys(map(_form_of_leaf, leaves))
    text = ", ".join(forms)
    text = f"{len(leaves)} x {text}" if len(leaves) > 1 else text
    return text if len(text) <= _MAX_FORM_CHARS else text[: _MAX_FORM_CHARS - 3] + "..."


def _form_of_leaf(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__
