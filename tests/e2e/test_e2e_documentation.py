"""docs/ten-minutes.md: what it says to type, once the server is there, does what it says."""

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ten-minutes.md").read_text()
#: The server's address and model are those of the test.
BLOCKS = [
    re.sub(r"^URL=.* MODEL=.*\n", "", block)
    for block in re.findall(r"^```\n(.*?)^```", PAGE.partition("\n## Ask\n")[2], re.MULTILINE | re.DOTALL)
]


async def run(script, serve):
    """What bash prints."""
    url = serve.base_url.removesuffix("/v1")
    environ = {
        **os.environ,
        "URL": url,
        "MODEL": serve.model,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", script), cwd=ROOT, env=environ, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, script
    return output.decode()


async def test_first_ten_minutes(serve):
    first, headers, report, look = BLOCKS
    asked = await run(first, serve)
    assert json.loads(asked)["choices"][0]["message"]["content"]
    function = first.rpartition("\nask\n")[0] + "\n"
    timing = await run(function + headers, serve)
    assert "x-request-id" in timing.lower()
    assert not re.search(r"\b(fetch|decode|process);", timing), "the image is found in shared memory"
    assert json.loads(await run(function + report, serve))["medialane"]["items"][0]["outcome"] == "hit"
    seen = await run(look, serve)
    assert "worker" in seen
    assert "medialane_media_items_total{" in seen
