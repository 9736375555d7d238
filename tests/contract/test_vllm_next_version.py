"""The move to the next vLLM, by its sources alone: it has no CPU build yet, and torch 2.14."""

from pathlib import Path

import pytest
import vllm

from vllm_sources import DownloadFailed, broken_imports, broken_seams, downloaded_sources

NEXT_VLLM = "0.33.0"

#: Every seam of the table that `NEXT_VLLM` breaks, and what the move changes there. The tests fail if vLLM breaks
#: another one, or mends one of these.
KNOWN_BREAKS = {
    "vllm.entrypoints.launchers.cli_args:make_arg_parser": "moved to entrypoints.common.cli_args; the adapter has both",
    "vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args": "moved likewise; the adapter has both",
    "vllm.renderers.chat_utils:_get_embeds_data": "moved to chat_utils.item_tracker; the adapter has both",
    "vllm.renderers.chat_utils:_resolve_vision_chunk_items": "moved likewise; no code of ours calls it, only the row",
}


@pytest.fixture(scope="module")
def next_vllm():
    try:
        return downloaded_sources(NEXT_VLLM)
    except DownloadFailed as error:
        pytest.skip(f"vLLM {NEXT_VLLM} cannot be downloaded: {error}")


@pytest.mark.timeout(60)  # time: parses 200 files of vLLM
def test_sources_of_the_installed_vllm_break_nothing():
    """They agree with the probe, which imports the same modules."""
    folder = Path(vllm.__file__).parents[1]
    assert broken_seams(folder) == {}
    assert broken_imports(folder) == []


@pytest.mark.slow  # a wheel of 336 MB, once: two minutes
@pytest.mark.timeout(360)
def test_next_vllm_breaks_the_known_seams_only(next_vllm):
    assert broken_seams(next_vllm) == dict.fromkeys(KNOWN_BREAKS, "is missing")


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_next_vllm_has_every_name_that_medialane_imports(next_vllm):
    """Where it has moved, `vllm_bridge.seams` imports it from either place."""
    assert broken_imports(next_vllm) == []
