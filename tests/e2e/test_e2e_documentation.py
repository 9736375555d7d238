"""What the pages say to type at a server does what they say, for the test's server, model and image."""

import asyncio
import base64
import json
import os
import re
import sys
from pathlib import Path

import pytest
from openai_http import chat, photo, picture

from medialane.testing.sample_media import sample_pdf

pytestmark = [pytest.mark.vllm]

ROOT = Path(__file__).parents[2]
TEN_MINUTES = (ROOT / "docs" / "ten-minutes.md").read_text()
PHOTO = photo(830, 320, 240)
URL = f"data:image/jpeg;base64,{base64.b64encode(PHOTO).decode()}"


def blocks(text, language=""):
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for each, block in found if each == language]


def here(text, serve):
    """An example of a page, for the test's server."""
    text = re.sub(r"https://example\.\w+/harbour\.jpg", URL, text.replace("Qwen/Qwen2.5-VL-3B-Instruct", serve.model))
    return re.sub(r"\b(localhost|127\.0\.0\.1):8000", serve.base_url.removeprefix("http://").removesuffix("/v1"), text)


async def run(*program, folder=ROOT):
    """What it prints."""
    environ = {**os.environ, "KEY": "none", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process = await asyncio.create_subprocess_exec(*program, cwd=folder, env=environ, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0, program[-1]
    return output.decode()


async def bash(script, folder=ROOT):
    return await run("bash", "-euo", "pipefail", "-c", script, folder=folder)


@pytest.fixture
def folder(tmp_path, serve):
    """Where the files of the examples are."""
    (tmp_path / "harbour.jpg").write_bytes(PHOTO)
    (tmp_path / "invoice.pdf").write_bytes(sample_pdf(["The total is 12."], width=298, height=420))
    body = {**chat(picture(830, 320, 240)), "model": serve.model, "mm_payload": "references"}
    (tmp_path / "chat.json").write_text(json.dumps(body))
    return tmp_path


async def test_first_ten_minutes(serve):
    found = [here(block, serve) for block in blocks(TEN_MINUTES.partition("\n## Ask\n")[2])]
    names, first, headers, report, look = found
    first = names + first
    asked = await bash(first)
    assert json.loads(asked)["choices"][0]["message"]["content"]
    function = first.rpartition("\nask\n")[0] + "\n"
    timing = await bash(function + headers)
    assert "x-request-id" in timing.lower()
    assert not re.search(r"\b(decode|process);", timing), "the image is found in shared memory"
    assert json.loads(await bash(function + report))["medialane"]["items"][0]["cache"] == "hit"
    seen = await bash(function + look)
    assert "worker" in seen
    assert "medialane_media_items_total{" in seen


async def test_examples_of_the_api(serve, folder):
    page = (ROOT / "docs" / "api.md").read_text()
    assert await run(sys.executable, "-c", here(blocks(page, "python")[0], serve), folder=folder)
    (upload,) = [block for block in blocks(page) if block.startswith("curl")]
    command, shown = here(upload, serve).splitlines()
    answer = json.loads(await bash(command, folder))
    assert answer.keys() == json.loads(shown).keys()
    # Other tests of this server expect that nothing is held.
    deleting = here(f"http://127.0.0.1:8000/medialane/v1/media/{answer['hash']}", serve)
    assert json.loads(await bash(f'curl -X DELETE -H "Authorization: Bearer $KEY" {deleting}'))["deleted"]


async def test_example_of_a_document(serve, folder):
    (example,) = blocks((ROOT / "docs" / "guides" / "documents.md").read_text(), "python")
    assert await run(sys.executable, "-c", here(example, serve), folder=folder)


async def test_examples_of_the_render_endpoints(serve, folder):
    page = (ROOT / "docs" / "reference" / "render.md").read_text()
    first, second = [here(re.sub(r"^\$ ", "", each, flags=re.MULTILINE), serve) for each in blocks(page, "console")]
    assert json.loads(await bash(first, folder))["token_ids"]
    assert json.loads(await bash(second, folder))["choices"]
