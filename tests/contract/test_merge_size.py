"""The side of an encoder's squares of patches, learned from samples of several families."""

import pytest

from medialane.vllm_bridge.learned import ModelProfile

#: qwen2_5_omni declares it under `thinker_config`; the last ones have no grid.
SIDES = {"qwen2_5_vl": 2, "qwen3_vl": 2, "qwen2_5_omni": 2, "internvl": 1, "qwen2_audio": 1}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SIDES)
def test_side_is_learned_wherever_the_family_declares_it(family_renderer, name):
    assert ModelProfile(family_renderer(name).get_mm_processor()).merge_size == SIDES[name]
