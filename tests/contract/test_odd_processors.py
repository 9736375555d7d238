"""Processors with habits that no family of ours has: none stops a process or gets another prompt than in vLLM.

Each is served in stage `features`, or that stage is given up at start for a reason.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.feature_extraction_utils import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import PromptReplacement
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.types.errors import FeatureUnsupported, InvalidRequest
from medialane.types.feature import Feature, MediaPayload
from medialane.types.media import MediaSize
from medialane.types.request import ExpandedPrompt
from medialane.vllm_bridge.frontend.renderer_hook import RendererHook
from medialane.vllm_bridge.items import (
    NO_OPTIONS,
    VllmProcessor,
    decode_item,
    decode_item_without_tensors,
    engine_media,
)
from medialane.vllm_bridge.learned import ModelProfile, VllmAssembler
from medialane.vllm_bridge.learned.assembler import placeholder_ranges
from medialane.vllm_bridge.learned.item_shape import trial_image
from medialane.vllm_bridge.seams.multimodal import process_whole
from model_parts import request_processor

IMAGE = "<|image_pad|>"


class Plain(BaseMultiModalProcessor):
    """One token per 32 columns; the pixels are one batched field."""

    def fields(self, width, height, kwargs):
        """The fields of one image."""
        return {"pixels": torch.full((3, 64, 64), float(width))}

    def count(self, index, width, data, kwargs):
        return width // 32

    def config(self, names):
        return {name: MultiModalFieldConfig.batched("image") for name in names}

    def sizes(self, mm_items):
        images = mm_items.get_items("image", object)
        return [images.get_image_size(n) for n in range(images.get_count())]

    def _apply_hf_processor_main(self, mm_items, hf_kwargs):
        return self.processed(mm_items, hf_kwargs)

    def processed(self, mm_items, hf_kwargs):
        """What Hugging Face's processor returns for all images."""
        made = [self.fields(size.width, size.height, hf_kwargs) for size in self.sizes(mm_items)]
        return BatchFeature({name: [one[name] for one in made if name in one] for one in made for name in one})

    def _get_mm_fields_config(self, hf_inputs, hf_processor_mm_kwargs):
        return self.config(hf_inputs)

    def _get_prompt_updates(self, mm_items, hf_processor_mm_kwargs, out_mm_kwargs):
        (token,) = self.info.get_tokenizer().encode(IMAGE, add_special_tokens=False)
        sizes, items = self.sizes(mm_items), out_mm_kwargs["image"]

        def tokens(index):
            return [token] * self.count(index, sizes[index].width, items[index].get_data(), hf_processor_mm_kwargs)

        return [PromptReplacement(modality="image", target=[token], replacement=tokens)]


class OptionalField(Plain):
    """A field of requests with a wide image."""

    def processed(self, mm_items, hf_kwargs):
        data, sizes = super().processed(mm_items, hf_kwargs), self.sizes(mm_items)
        is_wide = any(size.width > 500 for size in sizes)
        return BatchFeature({**data, **({"wide": [torch.ones(4)] * len(sizes)} if is_wide else {})})


class VaryingRank(Plain):
    def fields(self, width, height, kwargs):
        return {"pixels": torch.ones((3, 64, 64) if width < 500 else (width // 300, 3, 64, 64))}


class VaryingType(Plain):
    def fields(self, width, height, kwargs):
        pixels = torch.ones(3, 64, 64, dtype=torch.uint8 if width < 500 else torch.float32)
        return {"pixels": pixels, "tiles": [torch.ones(2, 9)] * (width // 200)}


class SmallRefused(Plain):
    def fields(self, width, height, kwargs):
        if width < 400:
            raise ValueError("the image is too small")
        return super().fields(width, height, kwargs)


class NoTensors(Plain):
    def fields(self, width, height, kwargs):
        return super().fields(width, height, kwargs) | {"name": "a", "crop": None, "is_wide": width > 500, "scale": 0.5}


class OtherTypes(Plain):
    def fields(self, width, height, kwargs):
        pixels = super().fields(width, height, kwargs)["pixels"]
        types = torch.uint16, torch.int16, torch.complex64, torch.float8_e4m3fn
        return {str(kind): pixels.to(kind) for kind in types} | {"none": torch.zeros(0, 4)}


class CountedByMask(Plain):
    """The mask is larger than what is always in a header; zeros instead would give one token."""

    def fields(self, width, height, kwargs):
        mask = torch.zeros(3000, 8, dtype=torch.int32)
        mask[:, 0] = torch.arange(3000) < width // 32
        return super().fields(width, height, kwargs) | {"mask": mask, "large": torch.ones(64, 3000)}

    def count(self, index, width, data, kwargs):
        return 1 + int(data["mask"].sum())


class CountedByMaskWithOption(CountedByMask):
    def count(self, index, width, data, kwargs):
        return 1 + (int(data["mask"].sum()) if kwargs.get("by_mask") else 4)


class FlatByMask(CountedByMask):
    """How a field is split depends on the mask."""

    def fields(self, width, height, kwargs):
        return super().fields(width, height, kwargs) | {"rows": torch.ones(width // 32, 4)}

    def processed(self, mm_items, hf_kwargs):
        data = super().processed(mm_items, hf_kwargs)
        return BatchFeature({**data, "rows": torch.cat(data["rows"]), "mask": torch.stack(data["mask"])})

    def _get_mm_fields_config(self, hf_inputs, hf_processor_mm_kwargs):
        sizes = hf_inputs["mask"].sum((1, 2))
        return self.config(hf_inputs) | {"rows": MultiModalFieldConfig.flat_from_sizes("image", sizes)}


class Compiled(Plain):
    """A preparer has no compiler."""

    def fields(self, width, height, kwargs):
        return {"pixels": _doubled(super().fields(width, height, kwargs)["pixels"])}


def _no_compiler(*_):
    raise OSError("there is no compiler")


@torch.compile(backend=_no_compiler, dynamic=True)
def _doubled(pixels):
    return pixels * 2


SERVED = [
    Plain,
    Compiled,
    OptionalField,
    VaryingRank,
    VaryingType,
    SmallRefused,
    NoTensors,
    OtherTypes,
    CountedByMask,
    CountedByMaskWithOption,
    FlatByMask,
]


class AllRefused(Plain):
    def fields(self, width, height, kwargs):
        raise ValueError("images are not supported today")


class Broken(Plain):
    def fields(self, width, height, kwargs):
        return {}["pixels"]


class LibraryMissing(Plain):
    def fields(self, width, height, kwargs):
        raise ModuleNotFoundError("No module named 'fbank'")


class FileMissing(Plain):
    def fields(self, width, height, kwargs):
        raise FileNotFoundError("speech_tokenizer")


class UnknownType(Plain):
    def fields(self, width, height, kwargs):
        return {"pixels": torch.zeros(3, 64, 64, dtype=torch.uint8).view(torch.bits8)}


class UnknownValue(Plain):
    def fields(self, width, height, kwargs):
        return super().fields(width, height, kwargs) | {"settings": {"width": width}}


class TwoItems(Plain):
    def processed(self, mm_items, hf_kwargs):
        data = super().processed(mm_items, hf_kwargs)
        return BatchFeature({name: [value for value in values for _ in range(2)] for name, values in data.items()})


class CountedByPixels(Plain):
    """The pixels are larger than a header may be."""

    def fields(self, width, height, kwargs):
        return {"pixels": torch.full((3, 700, 700), float(width))}

    def count(self, index, width, data, kwargs):
        return int(data["pixels"].max()) // 32


class CountedTogether(Plain):
    """The number of tokens is a field that depends on the request's other images."""

    def processed(self, mm_items, hf_kwargs):
        data = super().processed(mm_items, hf_kwargs)
        widest = max(size.width for size in self.sizes(mm_items))
        return BatchFeature({**data, "tokens": [torch.tensor(widest // 32) for _ in data["pixels"]]})

    def count(self, index, width, data, kwargs):
        return int(data["tokens"])


GIVEN_UP = {
    AllRefused: "the model's processor rejected this image",
    Broken: "pixels",
    LibraryMissing: "No module named 'fbank'",
    FileMissing: "speech_tokenizer",
    UnknownType: "bits8",
    UnknownValue: "gave a dict",
    TwoItems: "makes items {'image': 2} of one image",
    CountedByPixels: "too large for a header",
    CountedTogether: "2 image item(s) is expanded otherwise",
}


@pytest.fixture
def made(renderer):
    """A processor of a class, with the information of the tiny model, for images."""
    found = renderer.get_mm_processor()
    info = type(found.info)(found.info.ctx)
    info.get_supported_mm_limits = lambda: {"image": None}
    return lambda cls: cls(info, found.dummy_inputs)


@pytest.mark.parametrize("cls", SERVED, ids=lambda cls: cls.__name__)
def test_processor_is_served_in_stage_features_with_the_same_prompts(made, cls):
    processor = made(cls)
    profile = ModelProfile(processor)
    assert not profile.unfit
    heavy, assembler, checker = request_processor(profile), VllmAssembler(processor), profile.checker
    images = [trial_image(820, 400), trial_image(420, 300), trial_image(1300, 64)]
    token_ids = processor.info.get_tokenizer().encode(f"a{IMAGE}b{IMAGE}{IMAGE}", add_special_tokens=False)
    whole = process_whole(processor, token_ids, {"image": [engine_media(image) for image in images]})
    items = [heavy.process(image, b"{}") for image in images]
    assembled = assembler.assemble(
        token_ids, tuple(Feature("image", "a", item.header, (), item.size) for item in items), b"{}"
    )
    assert assembled.token_ids == whole["prompt_token_ids"]
    assert list(assembled.placeholders) == placeholder_ranges(whole)["image"]
    payloads = tuple(
        MediaPayload("image", "a", item.header, (), item.size, place)
        for item, place in zip(items, assembled.placeholders, strict=True)
    )
    decoded = [decode_item(item.header, item.buffers) for item in items]
    checker.check(ExpandedPrompt(assembled.token_ids, payloads), decoded)


@pytest.mark.parametrize(("cls", "reason"), GIVEN_UP.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_stage_features_is_given_up_at_start_for_a_reason(made, cls, reason):
    profile = ModelProfile(made(cls))
    assert reason in profile.unfit["image"]
    assert "\n" not in profile.unfit["image"]
    assert profile.checker  # of a worker
    request_processor(profile)  # of a preparer
    is_accepted = cls not in (AllRefused, Broken, TwoItems, LibraryMissing, FileMissing)
    assert profile.unfit_stages == {"image": "decoded" if is_accepted else "url"}


class CountedBySize(Plain):
    """As many tokens as the size says; as many tiles as the option `tile` makes of it."""

    def fields(self, width, height, kwargs):
        return {"tiles": torch.zeros(1 + width // kwargs.get("tile", 64), 3, 8, 8), "rows": torch.tensor(height)}


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        (b'{"tile":64}', True),
        (b'{"scale":2}', True),
        (b'{"tile":32}', False),
        (b'{"tile":1000}', False),
        (b'{"tile":"wide"}', False),
    ],
)
def test_tensors_that_the_number_of_tokens_does_not_follow_from_are_those_without_options(made, options, accepted):
    """The model would fail with any others, and its engine with it: vLLM compares neither."""
    requests = request_processor(ModelProfile(made(CountedBySize)))
    with nullcontext() if accepted else pytest.raises(InvalidRequest) as refused:
        requests.process(trial_image(820, 400), options)
    assert accepted or refused.value.status == 400


def test_whole_numbers_are_those_without_options(made):
    class Shifted(CountedBySize):
        def fields(self, width, height, kwargs):
            return super().fields(width, height + kwargs.get("shift", 0), kwargs)

    requests = request_processor(ModelProfile(made(Shifted)))
    with pytest.raises(InvalidRequest, match="change rows of the image") as refused:
        requests.process(trial_image(820, 400), b'{"shift":1}')
    assert refused.value.param == "mm_processor_kwargs"


def test_only_the_modality_that_is_unfit_is_given_up(renderer):
    """The tiny model's, whose videos its processor refuses to process in this test."""

    found = renderer.get_mm_processor()

    class WithoutVideo(type(found)):
        def _apply_hf_processor_main(self, mm_items, hf_kwargs):
            if "video" in mm_items:
                raise NotImplementedError("no video today")
            return super()._apply_hf_processor_main(mm_items, hf_kwargs)  # vLLM's own, which is overridden

    profile = ModelProfile(WithoutVideo(found.info, found.dummy_inputs))
    assert profile.unfit == {"video": "no video of a trial can be processed separately: no video today"}
    assert profile.checker  # of a worker


def test_media_of_a_model_with_a_modality_of_its_own_are_refused(renderer, made):
    """vLLM's own check of the reference would be a server error."""
    processor = made(Plain)
    processor.info.get_supported_mm_limits = lambda: {"point_cloud": None}
    profile = ModelProfile(processor)
    assert "point_cloud" in profile.unfit_reason
    assert profile.is_unfit
    assert set(profile.unfit_stages.values()) == {"url"}, "it is served for text"
    found = SimpleNamespace(model_config=renderer.model_config, get_mm_processor=lambda: processor)
    with pytest.raises(InvalidRequest, match="images are not supported"):
        RendererHook(found, SimpleNamespace(fail=lambda _: None), profile).reference("image", "medialane:0", None)


def test_only_what_is_read_is_added_to_the_header(made):
    item = VllmProcessor(made(CountedByMask)).process(trial_image(820, 400), b"{}")
    stand_in = decode_item_without_tensors(item.header)
    assert int(stand_in["mask"].data.sum()) == 820 // 32
    assert stand_in["mask"].data.nbytes > 16 * 1024  # a tensor, if it were not read
    assert {spec.shape for spec in item.specs} == {(3, 64, 64), (64, 3000)}


def test_options_decide_what_is_read(made):
    heavy = VllmProcessor(made(CountedByMaskWithOption))
    items = [heavy.process(trial_image(820, 400), options) for options in (b"{}", b'{"by_mask":true}')]
    shapes = [{spec.shape for spec in item.specs} for item in items]
    assert shapes == [{(3, 64, 64), (64, 3000), (3000, 8)}, {(3, 64, 64), (64, 3000)}]


def test_item_that_later_needs_too_much_of_a_header_is_not_sent_as_a_feature(made):
    """Smaller ones were, so it was not seen at start."""

    class CountedByLargePixels(CountedByPixels):
        def fields(self, width, height, kwargs):
            return {"pixels": torch.full((3, 700, 700 if width > 2000 else 70), float(width))}

    processor = made(CountedByLargePixels)
    assert not ModelProfile(processor).unfit
    with pytest.raises(FeatureUnsupported):
        VllmProcessor(processor).process(trial_image(3000, 64), b"{}")


class OwnPixels(Plain):
    """The pixels are the image's own. A small image's fit into its header."""

    def _apply_hf_processor_main(self, mm_items, hf_kwargs):
        images = [np.asarray(image) for image in mm_items.get_items("image", object).get_all()]
        made = [self.content(torch.from_numpy(image.copy()), hf_kwargs) for image in images]
        return BatchFeature({name: [one[name] for one in made] for name in made[0]})

    def content(self, image, kwargs):
        return {"pixels": image, "mean": image.double().mean() * kwargs.get("mean", 0)}


class CountsWhatItSees(OwnPixels):
    """Has one box for a dark image, else two."""

    def content(self, image, kwargs):
        return {"pixels": image, "boxes": torch.ones(1 if image.double().mean() < 100 else 2, 4)}


class LooksBright(OwnPixels):
    def content(self, image, kwargs):
        return {"pixels": image, "is_bright": torch.tensor(int(image.double().mean() > 126.9))}


class RefusesNoise(OwnPixels):
    def content(self, image, kwargs):
        if image.double().std() > 50:
            raise ValueError("no document")
        return {"pixels": image}


def test_header_is_described_unless_it_has_content(made):
    profile = ModelProfile(made(OwnPixels))
    requests = request_processor(profile)
    assert profile.assembler(max_tokens=99).predicted == {"image"}
    for width, height in ((451, 211), (640, 480), (73, 75)):
        image = trial_image(width, height)
        item = requests.process(image, NO_OPTIONS)
        described = requests.describe("image", image.size, NO_OPTIONS)
        assert (described.header, described.size) == (item.header, item.size)
    assert requests.describe("image", MediaSize(width=73, height=74), NO_OPTIONS) is None, "16 206 bytes of pixels"


def test_header_to_which_options_add_content_is_not_described(made):
    requests = request_processor(ModelProfile(made(OwnPixels)))
    size = MediaSize(width=640, height=480)
    assert requests.describe("image", size, b'{"other":1}') == requests.describe("image", size, NO_OPTIONS)
    assert requests.describe("image", size, b'{"mean":1}') is None


@pytest.mark.parametrize("cls", [CountsWhatItSees, LooksBright, RefusesNoise])
def test_headers_of_a_processor_that_looks_at_content_are_not_predicted(made, cls):
    profile = ModelProfile(made(cls))
    assert not profile.unfit
    assert not profile.assembler(max_tokens=99).predicted
    assert request_processor(profile).describe("image", MediaSize(width=640, height=480), NO_OPTIONS) is None
