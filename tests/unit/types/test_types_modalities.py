"""A new modality is a row in each table: no other file names one, except files about one modality alone."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

import medialane
from medialane.gateway.intake.search import Part, RequestBody
from medialane.media import MediaConfig
from medialane.media.decoders import DECODERS
from medialane.prepare import PrepareConfig
from medialane.types.media import DECODED, MODALITIES, Modality

SOURCE = Path(medialane.__file__).parent

#: What a new modality needs: a row, besides the decoder that `media/decoders.py` names.
TABLES = {
    "types/errors.py": "the error for damaged items",
    "types/media.py": "its name and decoded form; its parts in the APIs, its error, what its options may choose",
    "media/config.py": "the limits of its files and of what they decode to",
    "media/decoders.py": "how it is recognised, opened and decoded",
    "prepare/config.py": "the time to decode and process an item",
    "prepare/job_run.py": "the errors with which a preparer may refuse an item",
    "gateway/intake/search.py": "its members of bodies and content parts",
    "gateway/http/media_endpoint.py": "what a client is told of media that it has sent once",
    "tools/check/media.py": "items that `medialane check` sends, and whose tensors `--tensors` compares",
    "tools/check/kinds/chat.py": "cases of `medialane check`",
    "tools/check/kinds/pooling.py": "cases of `medialane check`",
    "vllm_bridge/engine/unexpanded_prompt.py": "vLLM's loader, for stage url",
    "vllm_bridge/frontend/renderer_hook.py": "methods of vLLM's connector",
    "vllm_bridge/items/options.py": "vLLM's decoding options",
    "vllm_bridge/items/preparation.py": "the form in which vLLM's loaders return an item",
    "vllm_bridge/frontend/render.py": "what of an item vLLM hashes",
    "vllm_bridge/items/header_values.py": "a stand-in for an item of a size",
    "vllm_bridge/learned/reference_tensors.py": "how Hugging Face's processors are called",
    "vllm_bridge/learned/sized_headers.py": "a blank of a size",
    "vllm_bridge/learned/item_shape.py": "items that a model's processor is tried with at start",
    "vllm_bridge/seams/multimodal.py": "vLLM's loaders",
    "vllm_bridge/seams/encoder_cache.py": "vLLM's dummy items",
}

#: Files that name a modality and need no change for a new one, and why.
ABOUT_ONE_MODALITY = {
    "cli/demo.py": "the demo's images",
    "cli/request_steps.py": "the new image of `doctor --request`",
    "cli/serve.py": "the example of a request",
    "tools/check/kinds/speech.py": "speech",
    "gateway/request/app_backend.py": "publishing decoded images",
    "gateway/intake/documents.py": "files that are images; pages as parts",
    "gateway/intake/extraction.py": "uploads of speech",
    "gateway/intake/places.py": "vLLM's list of JPEG frames",
    "gateway/intake/sent_features.py": "what one family calls an image",
    "gateway/request/assembly.py": "the predicted tokens of images",
    "gateway/request/media.py": "the budget of images; whether their pixels are converted",
    "gateway/request/store_items.py": "the budget of images",
    "media/container.py": "what video and audio files have in common",
    "media/data_url.py": "images published for RDMA reads",
    "media/video.py": "videos as lists of JPEG images",
    "prepare/processor.py": "sampling of videos; the cost of images",
    "store/published_images.py": "images published for RDMA reads",
    "store/items.py": "the budget of images",
    "tools/compare/client.py": "the name of an uploaded file",
    "tools/compare/traffic.py": "made-up media in place of recorded ones",
    "store/media_leases.py": "images, whose header has their size",
    "testing/fake_processor.py": "the fake processor's images",
    "testing/sample_media.py": "samples for tests and benchmarks",
    "testing/simulated/sequence.py": "the simulated engine's images",
    "testing/tiny_model.py": "a model of images and videos",
    "vllm_bridge/learned/model_profile.py": "media without pixels, images as tensors",
    "vllm_bridge/items/mistral_chat.py": "the media of Mistral's tokenizer",
    "vllm_bridge/learned/processor_factory.py": "frames of videos; images as tensors",
    "vllm_bridge/seams/vision_chunk.py": "what one family calls an image",
}


def names_of_modalities():
    parts = (name for traits in MODALITIES.values() for name in traits.parts)
    return {*MODALITIES, *parts}


def modalities_in_identifiers(nodes):
    """`max_image_bytes`, `InvalidImage` and `images` are about an image."""
    fields = (getattr(node, field, None) for node in nodes for field in ("id", "attr", "name", "arg"))
    words = re.findall("[A-Z]?[a-z]+", " ".join(field for field in fields if isinstance(field, str)))
    return {word.lower().removesuffix("s") for word in words} & {*MODALITIES}


def naming_files():
    """Files with the name of a modality in a string, or whose identifiers are about several."""
    names = names_of_modalities()
    for path in sorted(SOURCE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        constants = (node.value for node in nodes if isinstance(node, ast.Constant))
        is_named = any(isinstance(value, str) and value in names for value in constants)
        if is_named or len(modalities_in_identifiers(nodes)) > 1:
            yield path.relative_to(SOURCE).as_posix()


def test_modalities_are_named_in_tables_only():
    assert not set(naming_files()) - {*TABLES, *ABOUT_ONE_MODALITY}


def test_tables_have_only_files_that_name_modalities():
    assert not {*TABLES, *ABOUT_ONE_MODALITY} - set(naming_files())


@pytest.mark.parametrize("table", [MODALITIES, DECODERS, DECODED])
def test_tables_have_a_row_for_each_modality(table):
    assert tuple(table) == get_args(Modality)


@pytest.mark.parametrize("modality", MODALITIES)
def test_modality_has_its_limits(modality):
    assert MediaConfig().fetch_limits(modality).max_bytes > 0
    assert PrepareConfig().job_timeout_s(modality) > 0
    assert not MODALITIES[modality].has_pixels or MediaConfig().max_pixels(modality) > 0


def test_bodies_are_parsed_for_every_modality():
    """Places are read by position: the members of a part come first, in the order of the table."""
    parts = [name for traits in MODALITIES.values() for name in traits.parts]
    assert list(Part.__struct_fields__)[: len(parts)] == parts
    assert {traits.url_list for traits in MODALITIES.values()} <= set(RequestBody.__struct_fields__)
