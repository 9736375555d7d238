import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from medialane.testing.tiny_model import SPECIAL_TOKENS, build_once, cache_folder
from medialane.types.errors import StartupFailed

# How the folder of a model appears.


def test_second_build_reuses_the_first(tmp_path):
    built = []

    def write(folder: Path) -> None:
        built.append(folder)
        (folder / "config.json").write_text("{}")

    first = build_once(tmp_path / "cache" / "model", write)
    assert build_once(tmp_path / "cache" / "model", write) == first
    assert len(built) == 1
    assert [path.name for path in first.iterdir()] == ["config.json"]


def test_failed_build_leaves_no_folder(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_concurrent_builders_share_one_complete_folder(tmp_path):
    together = threading.Barrier(2)

    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        together.wait(5)

    found = []
    threads = [threading.Thread(target=lambda: found.append(build_once(tmp_path / "model", write))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [found[0]] * 2
    assert list(tmp_path.iterdir()) == [found[0]]


def test_cache_folder_follows_the_xdg_specification(tmp_path):
    home = str(tmp_path)
    assert cache_folder({"XDG_CACHE_HOME": "/cache", "HOME": home}) == Path("/cache/medialane")
    assert cache_folder({"XDG_CACHE_HOME": "relative", "HOME": home}) == tmp_path / ".cache" / "medialane"
    assert cache_folder({"HOME": home}) == tmp_path / ".cache" / "medialane"


@pytest.mark.parametrize("environ", [{}, {"HOME": ""}, {"HOME": "/nonexistent"}])
def test_user_without_a_home_has_a_cache_folder_of_its_own(environ, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = cache_folder(environ)
    assert folder == tmp_path / f"medialane-cache-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_cache_folder_that_another_user_has_made_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"medialane-cache-{os.geteuid()}").symlink_to(tmp_path)
    with pytest.raises(StartupFailed, match="another user"):
        cache_folder({})


@pytest.mark.timeout(120)
def test_every_token_id_has_text_and_message_parts_keep_their_order(tiny_model):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    config = transformers.AutoConfig.from_pretrained(tiny_model)
    assert config.text_config.vocab_size == len(tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(range(len(SPECIAL_TOKENS)))) == list(SPECIAL_TOKENS)
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "video"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>user\na<|vision_start|><|image_pad|><|vision_end|>b<|vision_start|><|video_pad|><|vision_end|>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
