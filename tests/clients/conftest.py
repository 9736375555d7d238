"""The servers of tests/e2e, which all clients ask the same, and the media of their requests."""

import io

import pytest_asyncio
import shared_servers
from openai_http import photo
from picture_server import picture_server
from PIL import Image

from audio_maker import tone
from medialane.media import MediaConfig
from medialane.media.document import open_document, render_page
from medialane.testing.sample_media import sample_pdf
from medialane.types.media import DocumentOptions

FILES = {"photo": "photo.jpg", "missing": "missing.jpg", "pdf": "report.pdf"}


def pytest_configure(config):
    shared_servers.add_to(config)


def pages_of(pdf: bytes) -> list[tuple[str, bytes]]:
    """Text and PNG of each page of a document, as medialane gives them to a model that uses more pixels."""
    data, config = memoryview(pdf), MediaConfig()
    pages = []
    for page in open_document(data, "", DocumentOptions(), config).pages:
        file = io.BytesIO()
        Image.fromarray(render_page(data, page.io, config).pixels).save(file, "png")
        pages.append((f"{page.text.strip()}\n", file.getvalue()))
    return pages


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def media(tmp_path_factory):
    """Files and URLs: see `Settings` in programs/recorded.py."""
    folder = tmp_path_factory.mktemp("media")
    photo_file, clip_file = folder / "photo.jpg", folder / "clip.wav"
    photo_file.write_bytes(photo(70))
    clip_file.write_bytes(tone(440, 1.5))
    pdf = sample_pdf(["A report.", "Its second page."], width=160, height=100)
    pdf_file, pages = folder / "report.pdf", []
    pdf_file.write_bytes(pdf)
    for number, (text, png) in enumerate(pages_of(pdf)):
        (page := folder / f"page{number}.png").write_bytes(png)
        pages.append((text, str(page)))
    async with picture_server({"photo.jpg": photo(70), "report.pdf": pdf}) as web:
        urls = {f"{name}_url": web.url(file) for name, file in FILES.items()}
        yield {"photo": str(photo_file), "clip": str(clip_file), "pdf": str(pdf_file), "pages": pages, **urls}
