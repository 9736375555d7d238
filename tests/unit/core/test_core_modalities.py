"""A new modality is a row in each table: no other file names one, but those that are about one modality alone."""

import ast
from pathlib import Path
from typing import get_args

import pytest

import medialane
from medialane.core.media import DECODED, Modality
from medialane.core.modalities import MODALITIES
from medialane.gateway.intake.request_body import Part, RequestBody
from medialane.media import MediaConfig
from medialane.media.decoders import DECODERS
from medialane.prepare import PrepareConfig

SOURCE = Path(medialane.__file__).parent

#: The tables: what a new modality needs.
TABLES = {
    "core/media.py",
    "core/modalities.py",
    "media/decoders.py",
}

#: Files that name a modality and need no change for a new one, and why.
ABOUT_ONE_MODALITY = {
    "gateway/gateway.py": "publishing decoded images",
    "gateway/intake/form.py": "uploads of speech",
    "gateway/intake/place.py": "vLLM's list of JPEG frames",
    "gateway/intake/search.py": "Cohere's and Anthropic's images",
    "gateway/request_media.py": "the budget of images, whose header tells their size",
    "gateway/store_features.py": "the budget of images",
    "store/items.py": "the budget of images",
    "store/encoded_store.py": "images published for RDMA reads",
    "media/container.py": "what video and audio files have in common",
    "media/published_image.py": "images published for RDMA reads",
    "cli/demo.py": "the demo's images",
    "cli/serve.py": "the example of a request",
}

#: What is vLLM's own, by modality: its loaders, options, dummy items; and what our tools send.
ROOMS = ("vllm_bridge/", "check/", "testing/")


def names_of_modalities():
    parts = (name for traits in MODALITIES.values() for name in traits.parts)
    return {*MODALITIES, *parts}


def naming_files():
    names = names_of_modalities()
    for path in sorted(SOURCE.rglob("*.py")):
        constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        if any(isinstance(value, str) and value in names for value in constants):
            yield path.relative_to(SOURCE).as_posix()


def test_modalities_are_named_in_tables_only():
    outside = {name for name in naming_files() if not name.startswith(ROOMS)}
    assert outside == TABLES | set(ABOUT_ONE_MODALITY)


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
