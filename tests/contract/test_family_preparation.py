"""Our split of vLLM's processor, compared with the whole, for each family: ids, placeholder ranges, tensors."""

from functools import cache

import numpy as np
import pytest
import torch
from tiny_families import DEPENDENT, PREPARED, family_params

from medialane.types.errors import PromptRejected
from medialane.types.feature import Feature, MediaPayload, PlaceholderRange
from medialane.types.hashing import canonical_options
from medialane.types.media import AudioSamples, FrameBatch, Image
from medialane.types.request import ExpandedPrompt
from medialane.vllm_bridge.items import VllmProcessor, decode_item, engine_media, expand_marks, tokenizes_blanks
from medialane.vllm_bridge.items.mistral_chat import blank_part
from medialane.vllm_bridge.learned import ModelProfile, VllmAssembler
from model_parts import request_processor

pytestmark = [
    # The first test of a family creates its checkpoint and renderer.
    pytest.mark.timeout(120),
    # a warning of torch when vLLM resamples audio
    pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning"),
]


def image(seed, width=300, height=200):
    return Image(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def video(seed, num_frames=6, width=120, height=90):
    """Every second frame of a clip, at ten frames per second."""
    frames = np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)
    metadata = {
        "total_num_frames": 2 * num_frames,
        "fps": 10.0,
        "duration": num_frames / 5,
        "video_backend": "opencv",
        "frames_indices": list(range(0, 2 * num_frames, 2)),
        "do_sample_frames": False,
    }
    return FrameBatch(frames, canonical_options(metadata))


def audio(pitch_hz, seconds=1.3, rate=16000):
    times = np.arange(int(seconds * rate), dtype=np.float32) / np.float32(rate)
    return AudioSamples(np.sin(np.float32(2 * np.pi * pitch_hz) * times), rate)


#: Two items of each modality that have nothing in common.
FIRST = {"image": image(0), "video": video(0), "audio": audio(440)}
SECOND = {"image": image(1, 171, 388), "video": video(1, 9, 200, 56), "audio": audio(900, 2.71, 44100)}

#: Prompts as parts; media are items of FIRST ("image") and SECOND ("image2").
PROMPTS = [
    ("Look: ", "image", " What is it?"),
    ("image",),
    ("image", "image2"),
    ("First ", "image2", "then\n", "image", "."),
    ("\n", "image", " one."),
    ("See ", "video", " and say."),
    ("video", " or ", "video2"),
    ("Hear ", "audio", " and say."),
    ("audio", "audio2"),
    ("One ", "audio2", "\n\n", "audio"),
    ("image", " and ", "video", "."),
    ("video", "image", "image2"),
    ("audio", " with ", "image"),
    ("audio2", "video", " then ", "image2", "audio"),
]


def items_of(prompt):
    """The media of a prompt, in its order."""
    return [(SECOND if part.endswith("2") else FIRST)[part.removesuffix("2")] for part in prompt if _is_media(part)]


def _is_media(part):
    return part.removesuffix("2") in FIRST


def takes(family, prompt):
    counts = [item.modality for item in items_of(prompt)]
    return all(counts.count(modality) <= family.limits.get(modality, 0) for modality in counts)


CASES = [
    pytest.param(family.name, prompt, id=f"{family.name}: {''.join(prompt)!r}", marks=family.marks)
    for family in PREPARED.values()
    for prompt in PROMPTS
    if takes(family, prompt)
]


class Halves:
    """A family's renderer, and our two halves over its processor."""

    def __init__(self, family, renderer):
        self.family = family
        self.renderer = renderer
        self.profile = ModelProfile(renderer.get_mm_processor())
        expand_marks(self.profile.processor)
        self.processor = request_processor(self.profile)
        self.assembler = VllmAssembler(self.profile.processor)
        self.checker = self.profile.checker

    def token_ids(self, prompt):
        parts = [part.removesuffix("2") if _is_media(part) else part for part in prompt]
        tokenizer = self.renderer.tokenizer
        if tokenizes_blanks(self.renderer):
            content = [blank_part(part) if part in FIRST else {"type": "text", "text": part} for part in parts]
            return tokenizer.apply_chat_template([{"role": "user", "content": content}])
        return tokenizer.encode(self.family.prompt(*parts), add_special_tokens=False)

    def prepared(self, prompt):
        """The items by our processor, and the prompt by our assembler. The features have vLLM's order: by modality."""
        by_modality = {}
        for media in items_of(prompt):
            by_modality.setdefault(media.modality, []).append(self.processor.process(media, b"{}"))
        items = _in_order(by_modality)
        return items, self.assembled(prompt, items)

    def assembled(self, prompt, items):
        features = [Feature(m, f"{n}", made.header, (), made.size) for n, (m, made) in enumerate(items)]
        return self.assembler.assemble(self.token_ids(prompt), tuple(features), b"{}")

    def described(self, prompt):
        """The prompt by the sizes of its media alone."""
        by_modality = {}
        for media in items_of(prompt):
            described = self.processor.describe(media.modality, media.size, b"{}")
            by_modality.setdefault(media.modality, []).append(described)
        return self.assembled(prompt, _in_order(by_modality))

    def whole(self, prompt):
        """vLLM's result for the whole request."""
        media = {}
        for item in items_of(prompt):
            media.setdefault(item.modality, []).append(engine_media(item))
        uuids = {modality: [f"{modality}{i}" for i in range(len(found))] for modality, found in media.items()}
        tokens = {"prompt_token_ids": self.token_ids(prompt), "multi_modal_data": media, "multi_modal_uuids": uuids}
        (rendered,) = self.renderer.render_cmpl([tokens])
        return rendered


@pytest.fixture(scope="module")
def halves(family_renderer):
    """`Halves` by family, created on first use."""
    return cache(lambda name: Halves(PREPARED[name], family_renderer(name)))


def _in_order(by_modality):
    return [(modality, made) for modality, found in by_modality.items() for made in found]


def ids_and_ranges(assembled):
    return assembled.token_ids, assembled.encoder_token_ids, assembled.placeholders


def assert_same_item(item, expected, family):
    mine = decode_item(item.header, item.buffers)
    assert mine.keys() == expected.keys()
    for name, elem in mine.items():
        wanted = as_sent(expected[name].data)
        assert type(elem.data) is type(wanted), name
        if isinstance(wanted, torch.Tensor):
            if name in family.padded:
                wanted = without_padding(wanted, elem.data.shape, is_zero=name not in family.joint)
            assert (elem.data.dtype, elem.data.shape) == (wanted.dtype, wanted.shape), name
            if name in family.joint:
                assert torch.equal(elem.data[..., :-1], wanted[..., :-1]), name
            else:
                assert torch.equal(elem.data, wanted), name
        else:
            assert same_values(elem.data, wanted), name
        assert type(elem.field) is type(expected[name].field), name


def same_values(one, other):
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_values, one, other))
    return one == other


def as_sent(value):
    """As it reaches EngineCore: vLLM's own messages make lists of tuples."""
    return [as_sent(inner) for inner in value] if isinstance(value, list | tuple) else value


def without_padding(wanted, shape, *, is_zero):
    """vLLM's tensor up to `shape`: what a processor adds to it when another item of the request is longer is zeros, or
    in a spectrum, silence."""
    own = wanted[tuple(slice(length) for length in shape)]
    assert not is_zero or wanted.count_nonzero() == own.count_nonzero()
    return own


def in_ranges(found):
    """(offset, length, marks of embeddings) of vLLM's placeholder ranges."""
    marks = [None if p.is_embed is None else bytes(p.is_embed.to(torch.uint8).numpy()) for p in found]
    return [(p.offset, p.length, mark) for p, mark in zip(found, marks, strict=True)]


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_split_processing_and_described_items_equal_whole_processing(halves, name, prompt):
    family = halves(name)
    expected = family.whole(prompt)
    items, assembled = family.prepared(prompt)
    for modality, wanted in expected["mm_kwargs"].items():
        made = [item for found, item in items if found == modality]
        for one, other in zip(made, wanted, strict=True):
            assert_same_item(one, other, family.family)
    assert assembled.token_ids == expected["prompt_token_ids"]
    assert assembled.encoder_token_ids == expected.get("encoder_prompt_token_ids")
    assert ids_and_ranges(family.described(prompt)) == ids_and_ranges(assembled)
    for modality, wanted in expected["mm_placeholders"].items():
        places = [p for p, (found, _) in zip(assembled.placeholders, items, strict=True) if found == modality]
        assert [(p.offset, p.length, p.is_embed) for p in places] == in_ranges(wanted)


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_worker_accepts_split_processing(halves, name, prompt):
    """Input that would terminate the engine is rejected; valid input for this model is accepted."""
    family = halves(name)
    items, assembled = family.prepared(prompt)
    handed = tuple(
        MediaPayload(modality, f"{number:064x}", made.header, (), made.size, place)
        for number, ((modality, made), place) in enumerate(zip(items, assembled.placeholders, strict=True))
    )
    decoded = [decode_item(made.header, made.buffers) for _, made in items]
    encoder_token_ids = assembled.encoder_token_ids
    family.checker.check(ExpandedPrompt(assembled.token_ids, handed, encoder_token_ids=encoder_token_ids), decoded)
    assert len(handed) == len(items_of(prompt))


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_encoder_accepts_each_item_alone(halves, name, prompt):
    """The prompt of an encode request is the placeholder of one item, as it is in the prompt of a request, and the
    token after it."""
    family = halves(name)
    items, assembled = family.prepared(prompt)
    for (modality, made), place in zip(items, assembled.placeholders, strict=True):
        alone = PlaceholderRange(0, place.length, place.is_embed)
        handed = MediaPayload(modality, "f" * 64, made.header, (), made.size, alone)
        token_ids = (assembled.encoder_token_ids or assembled.token_ids)[place.offset : place.end + 1]
        family.checker.check(ExpandedPrompt(token_ids, (handed,)), [decode_item(made.header, made.buffers)])


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_worker_accepts_vllms_whole_processing(halves, name, prompt):
    """Stages `decoded` and `url`; `{"do_resize":true}` represents options, which are validated more strictly."""
    family = halves(name)
    whole = family.whole(prompt)
    media = {}
    for item in items_of(prompt):
        media.setdefault(item.modality, []).append(engine_media(item))
    for options in (b"{}", b'{"do_resize":true}'):
        family.checker.check_rendered(whole, media, options)


def test_gemma3_image_before_a_newline_is_rejected_as_in_vllm(halves):
    """The newlines after an image and in the text merge into one token, which vLLM does not recognise."""
    prompt = ("image", "\nthen.")
    gemma3 = halves("gemma3")
    with pytest.raises(RuntimeError, match="prompt placeholders"):
        gemma3.whole(prompt)
    made = gemma3.processor.process(FIRST["image"], b"{}")
    feature = Feature("image", "image0", made.header, (), made.size)
    with pytest.raises(PromptRejected):
        gemma3.assembler.assemble(gemma3.token_ids(prompt), (feature,), b"{}")


@pytest.mark.slow
@pytest.mark.parametrize("name", DEPENDENT)
def test_family_whose_items_depend_on_each_other_is_served_whole(family_renderer, name):
    assert "number of items" in ModelProfile(family_renderer(name).get_mm_processor()).unfit_reason


@pytest.mark.parametrize("name", family_params())
def test_family_supports_per_item_preparation(halves, name):
    assert not halves(name).profile.unfit


@pytest.mark.parametrize("name", family_params(modality="image"))
def test_preparer_gives_the_same_tensors_as_for_pillow_images(halves, name):
    pillow = VllmProcessor(halves(name).profile.processor)
    preparer = halves(name).processor
    for item in (FIRST["image"], SECOND["image"]):
        made, wanted = preparer.process(item, b"{}"), pillow.process(item, b"{}")
        assert (made.header, made.specs, made.buffers) == (wanted.header, wanted.specs, wanted.buffers)
