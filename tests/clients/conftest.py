"""The servers of tests/e2e, which all clients ask the same, and the media of their requests."""

import pytest_asyncio
import shared_servers
from openai_http import photo
from picture_server import picture_server

from audio_maker import tone


def pytest_configure(config):
    shared_servers.add_to(config)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def media(tmp_path_factory):
    """Files and URLs: see `Settings` in programs/recorded.py."""
    folder = tmp_path_factory.mktemp("media")
    photo_file, clip_file = folder / "photo.jpg", folder / "clip.wav"
    photo_file.write_bytes(photo(70))
    clip_file.write_bytes(tone(440, 1.5))
    async with picture_server({"photo.jpg": photo(70)}) as web:
        urls = {"photo_url": web.url("photo.jpg"), "missing_url": web.url("missing.jpg")}
        yield {"photo": str(photo_file), "clip": str(clip_file), **urls}
