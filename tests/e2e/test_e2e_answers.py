"""Token ids equal plain vLLM's for all inputs in any order."""

import io

import pytest
from openai_http import assert_same, chat, data_url, image, photo, picture, text
from picture_server import picture_server
from PIL import Image

from medialane.testing.sample_media import sample_pixels

pytestmark = [pytest.mark.vllm, pytest.mark.thread]

ASK = text("Describe the picture.")


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(sample_pixels(seed, 320, 240)).save(buffer, "PNG")
    return buffer.getvalue()


BODIES = {
    "text": chat(text("Say something about pictures.")),
    "one image": chat(picture(0), ASK),
    "three images": chat(picture(0), picture(1, 640, 480), picture(2), ASK),
    "three images in another order": chat(picture(2), picture(0), picture(1, 640, 480), ASK),
    "the same image twice": chat(picture(3), text("and"), picture(3), ASK),
    "image before text": chat(picture(4), text("What is it?")),
    "image after text": chat(text("What is it?"), picture(4)),
    "image between texts": chat(text("Look at"), picture(4), text("and describe it.")),
    "png": chat(image(data_url(png(5), "image/png")), ASK),
    "tall and tiny images": chat(picture(6, 56, 560), picture(7, 30, 30), ASK),
}


@pytest.mark.parametrize("name", BODIES)
async def test_output_equals_plain_vllm(ours, plain, name):
    answer, right = await ours.succeed(BODIES[name]), await plain.succeed(BODIES[name])
    assert answer.ids
    assert_same(answer.json, right.json)


async def test_output_depends_on_the_images_and_their_order(plain):
    names = ("one image", "three images", "three images in another order", "image before text", "image after text")
    answers = {tuple((await plain.succeed(BODIES[name])).ids) for name in names}
    assert len(answers) == len(names)


async def test_multi_turn_output_with_images_equals_plain_vllm(ours, plain):
    turns = [
        {"role": "user", "content": [picture(0), ASK]},
        {"role": "assistant", "content": "A harbour."},
        {"role": "user", "content": [text("And this?"), picture(1)]},
    ]
    body = {**chat(), "messages": turns}
    assert_same((await ours.succeed(body)).json, (await plain.succeed(body)).json)


@pytest.mark.parametrize("name", ["text", "one image", "three images"])
async def test_streamed_output_equals_non_streamed(ours, plain, name):
    whole = await ours.succeed(BODIES[name])
    as_stream = {**BODIES[name], "stream": True, "stream_options": {"include_usage": True}}
    streamed, right = await ours.succeed(as_stream), await plain.succeed(as_stream)
    assert streamed.ids == whole.ids
    assert streamed.content == whole.content
    assert streamed.ids == right.ids
    assert_same(streamed.events[-1]["usage"], right.events[-1]["usage"])


async def test_image_by_url_gives_the_same_output_as_inline_data(ours, plain):
    by_data = await ours.succeed(chat(picture(8), ASK))
    async with picture_server({"photo.jpg": photo(8)}) as server:
        by_url = await ours.succeed(chat(image(server.url("photo.jpg")), ASK))
    assert by_url.ids == by_data.ids == (await plain.succeed(chat(picture(8), ASK))).ids
