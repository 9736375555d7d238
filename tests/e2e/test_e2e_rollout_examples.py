"""The rollout clients of examples/rl, as programs: an image of 8 rollouts is sent, processed and encoded once."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from embedding_requests import Engines
from openai_http import MAX_TOKENS, chat, photo, picture, text

pytestmark = [pytest.mark.vllm]

EXAMPLES = Path(__file__).parents[2] / "examples" / "rl"
QUESTION = "Describe the picture."
NUM_ROLLOUTS = 8
SIZE = (320, 240)
RENDER = "/v1/chat/completions/render"
GENERATE = "/inference/v1/generate"

#: Seeds of pictures that no other test uses.
RUNS = {
    ("trl_style_rollout", "tensors"): 800,
    ("trl_style_rollout", "references"): 801,
    ("skyrl_style_rollout", "tensors"): 802,
    ("skyrl_style_rollout", "references"): 803,
}


async def run(script, serve, tiny_model, image, *words):
    """What the program prints, at temperature 0."""
    base_url = serve.base_url.removesuffix("/v1")
    argv = [base_url, str(tiny_model), str(image), "--served-model-name", serve.model, "-n", str(NUM_ROLLOUTS)]
    argv += ["--temperature", "0", "--max-tokens", str(MAX_TOKENS), "--question", QUESTION, *words]
    program = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / f"{script}.py"), *argv, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await program.communicate()
    assert program.returncode == 0
    return json.loads(output.splitlines()[-1])


async def counts(ours, metrics_port):
    """Items that preparers have processed or described, and that engines have encoded."""
    jobs = (await ours.metrics()).value("medialane_preparer_jobs_total")
    return jobs, (await Engines(metrics_port).counts())[0]


@pytest.mark.parametrize(("script", "payload"), RUNS)
async def test_rollouts_share_one_image(ours, plain, serve, tiny_model, metrics_port, tmp_path, script, payload):
    seed = RUNS[script, payload]
    image = tmp_path / "photo.jpg"
    image.write_bytes(photo(seed, *SIZE))
    if payload == "references":  # their tokens follow from the size: a blank of it is processed once
        await ours.succeed({**chat(picture(seed + 50, *SIZE)), "mm_payload": "none"}, RENDER)
    num_jobs, num_encoded = await counts(ours, metrics_port)
    words = ["--store", serve.store_address] if (script, payload) == ("trl_style_rollout", "references") else []

    printed = await run(script, serve, tiny_model, image, "--payload", payload, *words)

    assert await counts(ours, metrics_port) == (num_jobs + 1, num_encoded + 1)
    right = await plain.succeed(chat(picture(seed, *SIZE), text(QUESTION)))
    assert printed["rollouts"] == [right.ids] * NUM_ROLLOUTS
    num_renders = 2 if script.startswith("skyrl") else 1
    image_bytes = len(photo(seed, *SIZE)) * 4 / 3
    assert printed["sent_bytes"][RENDER] < num_renders * image_bytes + 1000
    if payload == "references":
        assert printed["sent_bytes"][GENERATE] < num_renders * NUM_ROLLOUTS * 4000, "ids and a reference"
    if "tensors" in printed:
        assert printed["tensors"]["image_grid_thw"] == [3]
        assert printed["tensors"]["pixel_values"][1] == 3 * 2 * 14 * 14
    if "next_turn" in printed:
        assert len(printed["next_turn"]) == NUM_ROLLOUTS
