"""Traffic that a gateway has recorded, replayed by `medialane compare` against both servers."""

import asyncio
import json
import sys

import pytest
from openai_http import chat, picture, text

from medialane.gateway import parse_stand_in
from waiting import eventually

pytestmark = pytest.mark.vllm

ID = "X-Request-Id"
COMPARE_S = 60


async def test_recorded_traffic_with_images_is_replayed_with_equal_answers(
    gateways, recording, serve, plain_vllm, tmp_path
):
    same, other = picture(880, 320, 240), picture(881, 224, 168)
    bodies = [
        chat(text("What is this?"), same),
        chat(same, text("and"), other, stream=True),
        chat(text("No picture."), cache_salt="of a tenant"),
    ]
    names = [f"compared-{number}" for number in range(len(bodies))]
    for name, body in zip(names, bodies, strict=True):
        assert (await gateways["decoded/shm"].post(body, headers={ID: name})).status == 200

    def recorded():
        lines = map(json.loads, recording.read_text().splitlines())
        return [line for line in lines if line["custom_id"] in names]

    await eventually(lambda: len(recorded()) == len(bodies), "all are recorded")
    parts = [part for line in recorded()[:2] for part in line["body"]["messages"][0]["content"]]
    images = [parse_stand_in(part["image_url"]["url"]) for part in parts if part["type"] == "image_url"]
    assert [(image.width, image.height) for image in images] == [(320, 240), (320, 240), (224, 168)]
    assert images[0].key == images[1].key
    assert {line["medialane"]["status"] for line in recorded()} == {200}
    assert "of a tenant" not in recording.read_text()

    file, out = tmp_path / "traffic.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps(line) + "\n" for line in recorded()))
    against = ["--against", f"plain={plain_vllm.base_url}", "--against", f"medialane={serve.base_url}"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "medialane", "compare", serve.model, "--requests", str(file), "--out", str(out)),
        *against,
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await asyncio.wait_for(process.wait(), COMPARE_S) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["format"] == "recording"
    assert report["agreement"]["counts"] == {"equal": 3}
    assert report["sides"][1]["caches"] == {"miss": 2, "hit": 1}
