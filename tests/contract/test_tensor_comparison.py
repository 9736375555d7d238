"""`medialane check --tensors`: whole, and over families with raw pixels, with fields of vLLM's own, and with audio."""

import os

import msgspec
import pytest
from tiny_families import FAMILIES

from medialane.cli import main
from medialane.testing.tiny_model import cache_folder
from medialane.tools.check.tensor_program import run
from medialane.tools.check.tensors import TensorReport, TensorTask

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # warnings of processors would be refusals
]


def compared(name, *only):
    family = FAMILIES[name]
    folder = family.build(cache_folder(os.environ))
    return run(TensorTask(str(folder), family.flags, only))


def relations(report, field):
    """How a field of Hugging Face's processor compares, by item."""
    return {
        item.item: one.of_hugging_face.relation for item in report.items for one in item.fields if one.name == field
    }


def test_raw_pixels_equal_hugging_faces_once_they_are_normalised():
    report = compared("qwen2_5_vl", "57x31", "EXIF", "transparency", "7 frames")
    assert report.passed
    assert report.hugging_face == "Qwen2_5_VLProcessor"
    assert report.normalisation.rescale_factor == pytest.approx(1 / 255)
    assert relations(report, "pixel_values") == {
        "image 57x31": "normalised",
        "image turned by EXIF": "differs",  # vLLM turns it,
        "image with transparency": "differs",  # and lays it over white
    }
    assert relations(report, "pixel_values_videos") == {"video 7 frames 168x252": "normalised"}
    assert not any(item.errors for item in report.items)


def test_fields_of_vllms_own_are_missing_in_hugging_faces():
    report = compared("gemma3", "301x422", "grey")
    assert report.passed
    assert report.normalisation is None
    assert set(relations(report, "pixel_values").values()) == {"cast"}
    assert set(relations(report, "num_patches").values()) == {"missing"}


def test_audio_equals_hugging_faces_in_the_models_dtype():
    report = compared("qwen2_audio", "0.4 s", "stereo")
    assert report.passed
    assert set(relations(report, "input_features").values()) == {"cast"}
    assert set(relations(report, "feature_attention_mask").values()) == {"equal"}


def test_command_prints_a_table_and_writes_a_report(tiny_model, tmp_path, capsys):
    words = ["check", str(tiny_model), "--tensors", "--only", "57x31", "--json", str(tmp_path / "report.json")]
    assert main([*words, "--", "--max-model-len=4096"]) == 0
    assert "1 of 1 items have plain vLLM's tensors in medialane" in capsys.readouterr().out
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=TensorReport)
    assert [item.item for item in report.items] == ["image 57x31"]


def test_model_without_media_is_refused(tiny_model, capsys):
    assert main(["check", str(tiny_model), "--tensors", "--", "--language-model-only"]) == 2
    assert "the model takes no media" in capsys.readouterr().err
