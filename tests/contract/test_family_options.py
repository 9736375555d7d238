"""No client option makes the model's encoder fail, in any family and stage.

Accepted input is passed to the model's own encoder in this process, which must return as many embeddings
as the prompt has placeholders. In EngineCore, anything else terminates all requests.
"""

import asyncio
import json
import os
import tempfile
from functools import cache

import pytest
import torch
from test_family_preparation import FIRST, Halves, image
from tiny_families import FAMILIES, family_params
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.model_loader import get_model
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.inputs import PlaceholderRange as EnginePlaceholder
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from medialane.config import vllm_defaults
from medialane.prepare.processor import decoded_item
from medialane.testing.tiny_model import cache_folder
from medialane.types.errors import InvalidFeature, InvalidRequest, InvalidVideo, MedialaneError
from medialane.types.feature import Feature, MediaPayload
from medialane.types.hashing import canonical_options
from medialane.types.request import EngineRequest, ExpandedPrompt, UnexpandedPrompt
from medialane.vllm_bridge.items import MALFORMED_FEATURE, decode_item
from model_parts import unexpanded_renderer
from vllm_configs import vllm_args

pytestmark = [
    pytest.mark.whole,
    pytest.mark.timeout(120),  # the first test of a family creates its checkpoint, renderer and model
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

#: Options that change, or might change, what is computed: of the families' own processors and of others.
HOSTILE = [
    {"patch_size": 1},
    {"patch_size": 28},
    {"images_kwargs": {"patch_size": 1}},
    {"videos_kwargs": {"patch_size": 1}},
    {"merge_size": 0},
    {"merge_size": 1},
    {"merge_size": 4},
    {"temporal_patch_size": 1},
    {"temporal_patch_size": 4},
    {"size": 56},
    {"size": {"height": 0, "width": 0}},
    {"size": {"height": 56, "width": 56}},
    {"size": {"shortest_edge": 56}},
    {"size": {"shortest_edge": 448}},
    {"size": {"shortest_edge": 3136, "longest_edge": 6272}},
    {"crop_size": 224},
    {"crop_size": {"height": 56, "width": 56}},
    {"do_center_crop": False, "do_resize": False},
    {"do_resize": False},
    {"images_kwargs": {"do_resize": False}},
    {"do_rescale": False},
    {"do_rescale": False, "do_normalize": False},
    {"do_pad": False},
    {"num_crops": 1},
    {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 10, "pan_and_scan_min_ratio_to_activate": 1.0},
    {"crop_to_patches": False},
    {"crop_to_patches": True, "min_patches": 2, "max_patches": 4},
    {"min_patches": 8, "max_patches": 2},
    {"image_seq_length": 5},
    {"image_grid_pinpoints": [[56, 56]]},
    {"vision_feature_select_strategy": "full"},
    {"min_pixels": 3136, "max_pixels": 6272},
    {"min_pixels": 1, "max_pixels": 1},
    {"input_data_format": "channels_first"},
    {"data_format": "channels_last"},
    {"return_tensors": "np"},
    {"image_mean": [0.5], "image_std": [0]},
    {"do_sample_frames": True, "fps": 0.1},
    {"fps": 0},
    {"fps": 1e-9},
    {"videos_kwargs": {"fps": 1e-9}},
    {"sampling_rate": 8000},
    {"feature_size": 10},
    {"hop_length": 10},
    {"chunk_length": 5},
    {"max_length": 10},
    {"padding": "longest"},
    {"return_attention_mask": False},
    {"tokenizer": None, "image_processor": None},
]

#: A subset that has an effect and is valid: validation must accept it.
HARMLESS = {
    "qwen2_5_vl": ("image", {"min_pixels": 3136, "max_pixels": 6272}),
    "qwen3_vl": ("video", {"size": {"shortest_edge": 3136, "longest_edge": 6272}}),
    "gemma3": (
        "image",
        {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 10, "pan_and_scan_min_ratio_to_activate": 1.0},
    ),
    "internvl": ("image", {"crop_to_patches": True, "min_patches": 2, "max_patches": 4}),
}

#: Options with which an item would take more memory or time than without: of any family, in any form.
EXHAUSTING = [
    {"size": {"shortest_edge": 10**9, "longest_edge": 10**9}},
    {"size": {"shortest_edge": 10**9}},
    {"size": {"longest_edge": 10**10}},
    {"size": {"height": 100_000, "width": 100_000}},
    {"size": {"height": 1, "width": 1}},
    {"size": 100_000},
    {"size": {}},
    {"min_pixels": 10**9},
    {"max_pixels": 10**10},
    {"min_pixels": 10**9, "max_pixels": 10**9},
    {"max_pixels": None},
    {"max_pixels": 1e300},
    {"images_kwargs": {"min_pixels": 10**9}},
    {"videos_kwargs": {"size": {"shortest_edge": 10**9}}},
    {"common_kwargs": {"min_pixels": 10**9}},
    {"patch_size": 1},
    {"merge_size": 10**6},
    {"temporal_patch_size": 10**6},
    {"crop_size": {"height": 1, "width": 1}},
    {"do_resize": False},
    {"images_kwargs": {"do_resize": False}},
    {"image_grid_pinpoints": [[100_000, 100_000]]},
    {"crop_to_patches": True, "max_patches": 10**6, "min_patches": 10**6},
    {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 1, "pan_and_scan_max_num_crops": 10**6},
    {"pad_size": {"height": 100_000, "width": 100_000}},
    {"num_frames": 10**8},
    {"do_sample_frames": True, "num_frames": 10**8},
    {"fps": 10**6},
    {"max_frames": 10**8},
    {"hop_length": 1},
    {"n_fft": 10**8},
    {"feature_size": 10**8},
    {"chunk_length": 10**8},
    {"sampling_rate": 1},
    {"audio_kwargs": {"hop_length": 1}},
    {"padding": "max_length", "max_length": 10**9},
    {"pad_to_multiple_of": 10**9},
    {"text_kwargs": {"padding": "max_length", "max_length": 10**9}},
    {"an_option_of_a_later_version": 1},
]

CASES = [
    pytest.param(family.name, modality, id=f"{family.name}: {modality}", marks=family.marks)
    for family in FAMILIES.values()
    for modality in family.limits
]


class Model(Halves):
    """A family's validation and its model."""

    def __init__(self, family, renderer):
        super().__init__(family, renderer)
        folder = family.build(cache_folder(os.environ))
        args = vllm_args(folder, [*family.flags, "--mm-processor-cache-gb=0"])
        self._config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        with set_current_vllm_config(self._config):
            self._model = get_model(vllm_config=self._config)
        self._num_embeds = {}

    def handed(self, modality, options, media=None):
        """An item of stage `features` that validation has accepted, and its number of embeddings."""
        made = self.processor.process(media or FIRST[modality], options)
        feature = Feature(modality, "h", made.header, (), made.size)
        assembled = self.assembler.assemble(self.token_ids((modality,)), (feature,), options)
        item, (place,) = decode_item(made.header, made.buffers), assembled.placeholders
        handed = MediaPayload(modality, "h", made.header, (), made.size, place)
        prompt = ExpandedPrompt(assembled.token_ids, (handed,), options, assembled.encoder_token_ids)
        self.checker.check(prompt, [item])
        return item, place.num_embeds

    def rendered(self, modality, options):
        """The same for the stages processed by the worker, if it would not restrict their options further."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.checker, "check_options", lambda *_: None)
            rendered = asyncio.run(render(self, modality, json.loads(options)))
        return rendered["mm_kwargs"][modality][0], rendered["mm_placeholders"][modality][0].get_num_embeds()

    def num_embeds(self, modality, item):
        """As `GPUModelRunner._execute_mm_encoder` has the model encode it. Raises what would terminate EngineCore. Most
        options change nothing: items of equal content are encoded once."""
        ((_, _, batch),) = group_and_batch_mm_kwargs([(modality, item)], device="cpu")
        content = MultiModalHasher.hash_kwargs("blake3", modality=modality, **batch)
        if content not in self._num_embeds:
            with torch.inference_mode(), set_current_vllm_config(self._config), set_forward_context(None, self._config):
                (embeddings,) = self._model.embed_multimodal(**batch)
            self._num_embeds[content] = len(embeddings)
        return self._num_embeds[content]

    def last_position(self, modality, item, options):
        """The highest rotary position of a prompt with this item and no text around it."""
        made = self.processor.process(FIRST[modality], canonical_options(options))
        feature = Feature(modality, "h", made.header, (), made.size)
        assembled = self.assembler.assemble(self.token_ids((modality,)), (feature,), canonical_options(options))
        (place,) = assembled.placeholders
        spec = MultiModalFeatureSpec(
            data=item,
            modality=modality,
            identifier="h",
            mm_position=EnginePlaceholder(place.offset, place.length),
            mm_hash="h",
        )
        positions, _ = self._model.get_mrope_input_positions(assembled.token_ids, [spec])
        return int(positions.max())

    @property
    def num_rotary_rows(self):
        """Rows of the model's table of rotary embeddings."""
        tables = [m.cos_sin_cache for m in self._model.modules() if isinstance(m, MRotaryEmbedding)]
        return min(table.shape[0] for table in tables)


@pytest.fixture(scope="module")
def models(family_renderer):
    """`Model` by family, created on first use."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as store:
        for name, value in vllm_defaults("model", [], on_gpu=False, num_workers=1).items():
            patch.setenv(name, value)
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's CPU worker does
        init_distributed_environment(1, 0, f"file://{store}/store", 0, backend="gloo")
        with set_current_vllm_config(VllmConfig()):  # without a model: with groups that only some models use (experts)
            ensure_model_parallel_initialized(1, 1)
        yield cache(lambda name: Model(FAMILIES[name], family_renderer(name)))
        cleanup_dist_env_and_memory()


@pytest.mark.parametrize(("name", "modality"), CASES)
@pytest.mark.parametrize("stage", ["features", "source"])
def test_model_encodes_every_accepted_input(models, name, modality, stage):
    model = models(name)
    accepted = model.handed if stage == "features" else model.rendered
    num_accepted = 0
    for options in ({}, *HOSTILE):
        try:
            item, count = accepted(modality, canonical_options(options))
        except (MedialaneError, *MALFORMED_FEATURE):
            assert options, "without options it is accepted"
            continue
        found = model.num_embeds(modality, item)
        assert found >= count if options else found == count, options
        num_accepted += 1
    # Most options are of other families' processors, and mean nothing here, unless the processor rejects all it lacks.
    assert num_accepted > 10 or not model.family.in_make_test


@pytest.mark.parametrize("name", family_params(modality="image"))
def test_model_encodes_images_of_all_sizes(models, name):
    """Of one tile or many, enlarged or shrunk."""
    for width, height in ((57, 30), (30, 57), (640, 200), (240, 500), (1600, 1200)):
        item, count = models(name).handed("image", b"{}", image(2, width, height))
        assert models(name).num_embeds("image", item) == count, (width, height)


class NoRenderer:
    """Replaces vLLM's renderer: media must not reach it."""

    async def render_cmpl_async(self, _tokens):
        pytest.fail("the worker has run the model's processor")


@pytest.fixture(scope="module")
def halves(family_renderer):
    """`Halves` by family, created on first use."""
    return cache(lambda name: Halves(FAMILIES[name], family_renderer(name)))


async def render(one, modality, options, *, stage="decoded", renderer=None):
    """Have a worker process an item with these options."""
    source = unexpanded_renderer(renderer or one.renderer, one.profile, config=one.renderer.model_config)
    media = FIRST[modality]
    item = MediaPayload(modality, "h", b"", (), media.size)
    prompt = UnexpandedPrompt(one.token_ids((modality,)), (item,), canonical_options(options), stage)
    pixels = decoded_item(media).buffers[0].cast("B")
    try:
        return await source.render(EngineRequest("r", prompt, b""), prompt, [[pixels]])
    finally:
        source.close()


@pytest.mark.parametrize(("name", "modality"), CASES)
@pytest.mark.parametrize("stage", ["decoded", "url"])
async def test_options_that_could_exhaust_a_worker_never_reach_its_processor(halves, name, modality, stage):
    for options in EXHAUSTING:
        with pytest.raises(InvalidRequest) as error:
            await render(halves(name), modality, options, stage=stage, renderer=NoRenderer())
        assert (error.value.status, error.value.code) == (400, "invalid_request")
        assert error.value.param.removeprefix("mm_processor_kwargs.").partition(".")[0] in options


@pytest.mark.parametrize("name", HARMLESS)
async def test_supported_options_are_applied_in_every_stage(models, name):
    """Options other than pixel limits are applied by preparers only."""
    modality, options = HARMLESS[name]
    model = models(name)
    plain, asked = [model.handed(modality, canonical_options(o))[1] for o in ({}, options)]
    assert plain != asked
    if FAMILIES[name].has_pixel_limits:
        rendered = await render(model, modality, options)
        assert rendered["mm_placeholders"][modality][0].get_num_embeds() == asked
    else:
        with pytest.raises(InvalidRequest, match="--stage features"):
            await render(model, modality, options)


@pytest.mark.slow  # the family is
@pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning")
async def test_limit_of_images_alone_is_refused_for_videos_as_in_vllm(halves):
    """transformers raises a TypeError, for which plain vLLM answers 400."""
    one, options = halves("qwen3_omni"), {"max_pixels": 6272}
    with pytest.raises(InvalidVideo) as refused:
        one.processor.process(FIRST["video"], canonical_options(options))
    assert refused.value.status == 400
    with pytest.raises(InvalidRequest):
        await render(one, "video", options)


@pytest.mark.parametrize("stage", ["features", "source"])
@pytest.mark.parametrize("options", [{"patch_size": 1}, {"merge_size": 4}, {"temporal_patch_size": 1}], ids=str)
def test_unsupported_options_are_rejected_as_invalid_in_every_stage(models, options, stage):
    model = models("qwen2_5_vl")
    accepted = model.handed if stage == "features" else model.rendered
    with pytest.raises(InvalidFeature):
        accepted("image", canonical_options(options))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_5_omni"])
def test_rotary_positions_of_accepted_videos_are_in_the_models_table(models, name):
    model = models(name)
    num_accepted = 0
    for fps in (1e-9, 1e-6, 1e-4, 1e-3, 0.01, 0.5, 2, 30):
        try:
            item, _ = model.handed("video", canonical_options({"fps": fps}))
        except (InvalidFeature, InvalidRequest):
            assert fps < 0.5, "an ordinary video"
            continue
        num_accepted += 1
        assert model.last_position("video", item, {"fps": fps}) < model.num_rotary_rows
    assert num_accepted
    assert (num_accepted < 8) == (name == "qwen2_5_omni"), "the other ignores it for frames that are sampled already"
