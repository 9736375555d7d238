"""The encoder's digest: equal on every host for the same weights, another one for others."""

import json
import shutil
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from medialane.types.request import EncoderCard
from medialane.vllm_bridge.engine.engine_embeddings import (
    UnknownEncoder,
    encoder_card,
    encoder_digest,
    weights_version,
)

SIZE = 40 << 20


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    for number in range(2):
        (path / f"model-{number}.safetensors").write_bytes(bytes([number]) * SIZE)
    return path


def weights(folder, load_format="auto", **changes):
    model = SimpleNamespace(**{"model": str(folder), "model_weights": "", "revision": None, "seed": 0} | changes)
    config = SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format=load_format))
    return weights_version(config)


def test_copy_of_a_model_in_another_folder_has_its_digest(folder, tmp_path):
    other = Path(shutil.copytree(folder, tmp_path / "copy"))
    (other / "README.md").write_text("another file")
    assert weights(folder) == weights(other)


@pytest.mark.parametrize("place", [0, 100, (1 << 20) - 1, SIZE // 2 - 100, SIZE - 1])
def test_changed_weights_are_detected(folder, place):
    before = weights(folder)
    with (folder / "model-1.safetensors").open("r+b") as file:
        file.seek(place)
        file.write(b"\xff")
    assert weights(folder) != before


def test_small_tensor_between_the_samples_of_a_large_file_is_detected(folder):
    """A projector that was trained, in a file; one byte in a thousand is read."""
    sizes = {"model.large": 300 << 20, "visual.merger": 50 << 10, "model.larger": 400 << 20}
    offsets = [0, *accumulate(sizes.values())]
    places = {name: {"data_offsets": pair} for name, pair in zip(sizes, pairwise(offsets), strict=True)}
    header = json.dumps({"__metadata__": {"format": "pt"}, **places}).encode()
    file = folder / "model-1.safetensors"
    with file.open("wb") as written:
        written.write(len(header).to_bytes(8, "little") + header)
        written.truncate(8 + len(header) + offsets[-1])  # sparse
    before = weights(folder)
    with file.open("r+b") as changed:
        changed.seek(8 + len(header) + offsets[1])
        changed.write(b"\1" * sizes["visual.merger"])
    assert weights(folder) != before


def test_file_that_was_renamed_removed_or_has_grown_is_detected(folder):
    found = {weights(folder)}
    file = folder / "model-1.safetensors"
    file.rename(folder / "model-2.safetensors")
    found.add(weights(folder))
    with (folder / "model-2.safetensors").open("ab") as grown:
        grown.write(b"\1")
    found.add(weights(folder))
    (folder / "model-2.safetensors").unlink()
    found.add(weights(folder))
    assert len(found) == 4


def test_weights_of_unknown_version_are_not_guessed(folder, tmp_path):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    for model in ({"folder": folder}, {"folder": "nobody/nothing"}, {"folder": folder, "model_weights": "s3://x"}):
        with pytest.raises(UnknownEncoder):
            weights(**model)
    assert weights(folder, load_format="dummy") == "random 0"


def measured(**changes):
    return {"widths": {"image": 128}, "dtypes": {"image": "bfloat16"}, "faults": {}} | changes


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([measured(), measured(widths={"image": 64})], "different encoders"),
        ([measured(widths={}, dtypes={}, faults={"image": "rotary positions"})], "image: rotary positions"),
        ([measured(dtypes={"image": "bfloat16", "video": "float32"})], "dtypes"),
    ],
    ids=["ranks", "fault", "dtypes"],
)
def test_encoder_that_cannot_be_described_is_not_used(ranks, why):
    with pytest.raises(UnknownEncoder, match=why):
        encoder_card(None, ranks)


def test_card_has_what_was_measured_and_a_digest_of_the_settings_of_the_encoder(tiny_model):
    from model_parts import engine_config

    def of(*flags):
        return encoder_digest(engine_config(tiny_model, "--enforce-eager", *flags))

    before = of()
    config = engine_config(tiny_model, "--enforce-eager")
    assert encoder_card(config, [measured(), measured()]) == EncoderCard(before, "bfloat16", {"image": 128})
    assert of("--max-model-len=1234", "--max-num-seqs=3") == before
    for flag in ("--dtype=float32", "--mm-encoder-tp-mode=data", "--no-mm-device-do-normalize", "--load-format=dummy"):
        assert of(flag) != before, flag
