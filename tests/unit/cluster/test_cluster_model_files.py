"""What a store downloads for the processes that build the processor; tests/contract/test_hub_model.py uses a hub."""

import asyncio
import json
import threading

import pytest

from medialane.cluster import Repository, fetch_files, repositories
from medialane.types.errors import StartupFailed


@pytest.fixture
def hub(tmp_path):
    return Hub(tmp_path)


class Hub:
    """A folder that has one for each repository of a hub, and the downloads."""

    def __init__(self, folder):
        self.folder = folder
        self.asked = []

    def download(self, repository):
        self.asked.append(repository)
        folder = self.folder / repository.name.replace("/", "--")
        if not folder.is_dir():
            raise OSError("401 Client Error")
        return str(folder)


def add(folder, name, auto_map=None):
    path = folder / name.replace("/", "--")
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"auto_map": auto_map} if auto_map else {}))


@pytest.mark.parametrize(
    ("model", "flags", "environ", "found"),
    [
        ("org/model", [], {}, [Repository("org/model")]),
        ("org/model", ["--revision", "v2"], {}, [Repository("org/model", "v2")]),
        (
            "org/model",
            ["--tokenizer", "org/tokenizer", "--tokenizer-revision=v3", "--hf-config-path", "org/config"],
            {},
            [Repository("org/model"), Repository("org/tokenizer", "v3"), Repository("org/config")],
        ),
        ("org/model", ["--tokenizer", "/"], {}, [Repository("org/model")]),
        ("org/model", [], {"VLLM_USE_MODELSCOPE": "1"}, []),
        ("/", [], {}, []),
        ("s3://bucket/model", [], {}, []),
        ("model.gguf", [], {}, []),
    ],
)
def test_repositories_are_those_of_the_hub(model, flags, environ, found):
    assert repositories(model, flags, environ) == found


async def test_code_of_other_repositories_is_downloaded_too(hub):
    folder, asked = hub.folder, hub.asked
    tokenizers = ["c.D", "org/more--e.F"]
    add(folder, "org/model", {"AutoConfig": "org/code--a.B", "AutoTokenizer": tokenizers, "AutoModel": "g.H"})
    add(folder, "org/code")
    add(folder, "org/more")
    await fetch_files([Repository("org/model", "v2")], code_revision="v3", download=hub.download)
    assert asked[0] == ("org/model", "v2")
    assert set(asked[1:]) == {("org/code", "v3"), ("org/more", "v3")}


async def test_failed_download_names_the_model(hub):
    with pytest.raises(StartupFailed, match="org/absent cannot be downloaded"):
        await fetch_files([Repository("org/absent")], download=hub.download)


async def test_unexpected_error_ends_the_wait():
    def download(_repository):
        raise TypeError("of a library")

    with pytest.raises(TypeError, match="of a library"):
        await fetch_files([Repository("org/model")], download=download)


async def test_cancelled_download_is_not_waited_for():
    begun, may_end = threading.Event(), threading.Event()

    def download(_repository):
        begun.set()
        may_end.wait(10)
        return "/nowhere"

    fetching = asyncio.create_task(fetch_files([Repository("org/model")], download=download))
    await asyncio.to_thread(begun.wait, 10)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    may_end.set()
