"""Items without a file: client-made embeddings, and media referenced by the uuid of an earlier request."""

import pytest
from made_embeddings import embeds
from openai_http import assert_same, chat, data_url, image, photo, picture, text

pytestmark = pytest.mark.vllm

ASK = text("Describe the picture.")
#: Separate images: plain vLLM returns 500 for an image that was part of a rejected request (its API
#: server counts the image as cached in the engine, which never got it).
ONE, OTHER = picture(600), image(data_url(photo(601)))


BODIES = {
    "embeddings": chat(embeds(1), ASK),
    "two embeddings": chat(embeds(1), text("and"), embeds(2, rows=12, grid=(1, 4, 12)), ASK),
}


@pytest.mark.parametrize("name", BODIES)
async def test_output_for_embeddings_equals_plain_vllm(ours, plain, name):
    answer, right = await ours.succeed(BODIES[name]), await plain.succeed(BODIES[name])
    assert_same(answer.json, right.json)
    details = [found.json["usage"]["prompt_tokens_details"]["multimodal_tokens"] for found in (answer, right)]
    assert details[0] == details[1]
    assert details[0]["image"] > 0
    assert_same((await ours.succeed(BODIES[name])).json, right.json)


async def test_output_depends_on_the_embeddings(ours):
    answers = {
        tuple((await ours.succeed(chat(embeds(seed, rows=96, grid=(1, 16, 24)), ASK))).ids) for seed in (3, 4, 5)
    }
    assert len(answers) > 1


async def test_mismatched_embeddings_error_names_its_field_and_the_worker_survives(ours):
    answer = await ours.post(chat(embeds(6, rows=23), ASK))
    assert answer.status == 400
    assert answer.error["param"] == "messages[0].content[0].image_embeds"
    await ours.succeed(chat(embeds(6), ASK))


async def test_uuid_without_content_gives_the_same_output_as_its_content(ours, plain):
    right = await plain.succeed(chat(ONE, ASK))
    assert_same((await ours.succeed(chat({**ONE, "uuid": "of-600"}, ASK))).json, right.json)
    again = await ours.succeed(chat({"type": "image_url", "image_url": None, "uuid": "of-600"}, ASK))
    assert again.cache == "hit"
    assert_same(again.json, right.json)


async def test_uuid_sent_with_other_content_is_a_conflict_and_keeps_its_content(ours, plain):
    right = await plain.succeed(chat(ONE, ASK))
    await ours.succeed(chat({**ONE, "uuid": "reused"}, ASK))
    answer = await ours.post(chat({**OTHER, "uuid": "reused"}, ASK))
    assert (answer.status, answer.error["code"]) == (409, "uuid_conflict")
    assert answer.error["param"] == "messages[0].content[0].image_url"
    named = await ours.succeed(chat({"type": "image_url", "image_url": None, "uuid": "reused"}, ASK))
    assert_same(named.json, right.json)


async def test_unknown_uuid_error_names_the_uuid(ours):
    answer = await ours.post(chat({"type": "image_url", "image_url": None, "uuid": "never-sent"}, ASK))
    assert answer.status == 400
    assert answer.error["param"] == "messages[0].content[0].image_url"
    assert "never-sent" not in answer.error["message"]


async def test_embeddings_can_be_referenced_by_uuid(ours, plain):
    right = await plain.succeed(chat(embeds(7), ASK))
    await ours.succeed(chat(embeds(7, uuid="embeds-7"), ASK))
    named = await ours.succeed(chat({"type": "image_embeds", "image_embeds": None, "uuid": "embeds-7"}, ASK))
    assert_same(named.json, right.json)
