"""Properties of plain vLLM that the comparisons rely on."""

import base64

import aiohttp
import pytest

from medialane.testing.sample_media import sample_jpeg

pytestmark = pytest.mark.vllm


async def greedy_ids(server, *seeds: int, before: str = "", after: str = "Describe.") -> list[int]:
    images = [base64.b64encode(sample_jpeg(seed, 512, 384)).decode() for seed in seeds]
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{image}"}} for image in images]
    texts = [[{"type": "text", "text": text}] if text else [] for text in (before, after)]
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": texts[0] + parts + texts[1]}],
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.base_url}/chat/completions", json=body) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        return answer["choices"][0]["token_ids"]


async def test_output_is_deterministic_and_depends_on_the_image(plain_vllm):
    answers = [await greedy_ids(plain_vllm, seed) for seed in (0, 1, 2, 3)]
    assert len({tuple(ids) for ids in answers}) == 4
    assert await greedy_ids(plain_vllm, 0) == answers[0]


async def test_output_depends_on_the_order_of_images_and_text(plain_vllm):
    answers = [
        await greedy_ids(plain_vllm, 0, 1),
        await greedy_ids(plain_vllm, 1, 0),
        await greedy_ids(plain_vllm, 0, 1, before="Describe.", after=""),
    ]
    assert len({tuple(ids) for ids in answers}) == 3
