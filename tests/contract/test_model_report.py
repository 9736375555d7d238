"""What `medialane doctor MODEL` says, for a model that is not running."""

import msgspec
import pytest

from medialane.vllm_bridge.engine.engine_options import model_report
from medialane.vllm_bridge.learned import ProfileReport
from medialane.vllm_bridge.learned.model_profile import ModalityProfile

pytestmark = pytest.mark.timeout(120)

FLAGS = ["--max-model-len=4096", "--enforce-eager"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            [],
            {
                "architecture": "Qwen2_5_VLForConditionalGeneration",
                "media": ProfileReport(
                    modalities={
                        "image": ModalityProfile(999, "features", "", 12_845_056, "pixel_values", is_predicted=True),
                        "video": ModalityProfile(
                            999, "features", "", 12_845_056, "pixel_values_videos", is_predicted=True
                        ),
                    },
                    accepts_item_options=True,
                    merge_size=2,
                    predicts_image_tokens=True,
                ),
                "no_embeddings": "",
                "connector": "NixlConnector",
                "not_split": "",
            },
        ),
        (["--video-pruning-rate=0.5"], {"no_embeddings": "the tokens of videos are pruned (--video-pruning-rate)"}),
        (["--runner=pooling"], {"not_split": "--role prefill is not possible: a pooling model generates nothing"}),
        (["--language-model-only"], {"media": None, "no_embeddings": "--language-model-only is set"}),
    ],
    ids=["all", "pruned", "pooling", "text"],
)
def test_profile_and_embeddings_follow_from_model_and_flags(tiny_model, flags, expected):
    found = msgspec.structs.asdict(model_report(str(tiny_model), [*FLAGS, *flags]))
    assert found.items() >= expected.items()


def test_modality_that_a_prompt_may_not_have_is_reported_as_such(tiny_model):
    found = model_report(str(tiny_model), [*FLAGS, '--limit-mm-per-prompt={"image": 3, "video": 0}']).media
    assert {name: one.limit for name, one in found.modalities.items()} == {"image": 3, "video": 0}
