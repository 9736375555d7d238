"""What `medialane doctor MODEL` says, for a model that is not running."""

import pytest

from medialane.vllm_bridge.engine.model_report import model_report

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            [],
            {
                "architecture": "Qwen2_5_VLForConditionalGeneration",
                "takes_media": True,
                "limits": {"image": 999, "video": 999},
                "no_features": "",
                "no_embeddings": "",
            },
        ),
        (['--limit-mm-per-prompt={"image": 3, "video": 0}'], {"limits": {"image": 3, "video": 0}}),
        (
            ["--video-pruning-rate=0.5"],
            {"takes_media": True, "no_embeddings": "the tokens of videos are pruned (--video-pruning-rate)"},
        ),
        (
            ["--language-model-only"],
            {"takes_media": False, "limits": {}, "no_embeddings": "--language-model-only is set"},
        ),
    ],
    ids=["all", "limited", "pruned", "text"],
)
def test_stage_and_embeddings_follow_from_model_and_flags(tiny_model, flags, expected):
    found = model_report(str(tiny_model), ["--max-model-len=4096", "--enforce-eager", *flags])
    assert found.items() >= expected.items()
