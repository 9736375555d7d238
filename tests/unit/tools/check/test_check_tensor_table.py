"""What `medialane check --tensors` prints."""

import io

import msgspec
import pytest
from rich.console import Console

from medialane.tools.check import TensorReport, encode, show_tensors
from medialane.tools.check.tensors import ItemTensors
from medialane.types.tensor import Comparison, FieldComparison, PixelNormalisation

RAW = FieldComparison(
    name="pixel_values",
    plain="uint8 (24, 1176)",
    ours="uint8 (24, 1176)",
    hugging_face="float32 (24, 1176)",
    of_ours=Comparison("equal"),
    of_hugging_face=Comparison("normalised", 4.8e-7),
)
TURNED = msgspec.structs.replace(RAW, of_hugging_face=Comparison("differs", 3.8))
OTHER = msgspec.structs.replace(RAW, of_ours=Comparison("differs", 1.0))


def item(name, *fields, **more):
    return ItemTensors(name, "image", more.pop("stage", "features"), fields, **more)


def report(*items, **more):
    more = {"normalisation": None, "hugging_face": "Qwen2VLProcessor", **more}
    return TensorReport(
        model="./m", medialane="1", vllm="2", transformers="3", vllm_flags=(), dtype="bfloat16", items=items, seconds=9,
        **more,
    )  # fmt: skip


def shown(made):
    out = io.StringIO()
    show_tensors(made, Console(file=out, width=160))
    return out.getvalue()


def test_items_whose_field_compares_alike_share_a_row():
    text = shown(report(item("image 1x1", RAW), item("image turned", TURNED), item("image 2x2", RAW)))
    rows = [line for line in text.splitlines() if line.startswith("│ pixel_values")]
    assert len(rows) == 2
    assert "1x1, 2x2" in rows[0]
    assert "equal after normalisation (up to 4.8e-07)" in rows[0]
    assert "turned" in rows[1]
    assert "differs (up to 3.8)" in rows[1]
    assert (
        "3 of 3 items have plain vLLM's tensors in medialane; Qwen2VLProcessor of transformers agrees for 2 of 3"
        in text
    )


def test_what_a_trainer_has_to_do_with_raw_pixels_is_said():
    text = shown(report(item("image", RAW), normalisation=PixelNormalisation(1 / 255, (0.5,) * 3, (0.25,) * 3)))
    assert "rescale_factor 0.00392157, mean [0.5, 0.5, 0.5], std [0.25, 0.25, 0.25]" in text


def test_what_refuses_an_item_is_named():
    refused = item("image in grey", RAW, errors={"hugging_face": "ValueError: no"})
    assert "image in grey: Hugging Face's processor refuses it: ValueError: no" in shown(report(refused))
    without = shown(report(refused, hugging_face="", no_hugging_face="OSError: none"))
    assert "no Hugging Face processor: OSError: none" in without
    assert "refuses it" not in without


def test_known_differences_are_explained():
    advice = "image turned by EXIF: vLLM turns images as their EXIF data say"
    assert advice in shown(report(item("image turned by EXIF", TURNED)))
    assert advice not in shown(report(item("image turned by EXIF", RAW)))


def test_other_stages_are_named():
    assert "image: workers run the processor (stage decoded)" in shown(report(item("image", RAW, stage="decoded")))


def test_a_model_of_which_plain_vllm_accepts_nothing_proves_nothing():
    refused = item("a", errors={"plain": "no", "ours": "no"})
    assert "plain vLLM accepts none of them" in shown(report(refused))


@pytest.mark.parametrize(
    ("items", "passed"),
    [
        ([item("a", RAW), item("b", TURNED)], True),  # what Hugging Face's does is a finding
        ([item("a", RAW), item("b", OTHER)], False),
        ([item("a", RAW), item("b", errors={"ours": "no"})], False),
        ([item("a", RAW), item("b", errors={"plain": "no", "ours": "no"})], True),
        ([item("b", errors={"plain": "no", "ours": "no"})], False),
    ],
)
def test_a_check_passes_if_an_engine_is_given_what_plain_vllm_gives(items, passed):
    made = report(*items)
    assert made.passed == passed
    assert msgspec.json.decode(encode(made), type=TensorReport) == made
