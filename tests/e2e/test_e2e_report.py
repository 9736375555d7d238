"""The media report of a request, by a whole server."""

import pytest
from openai_http import assert_same, chat, picture, text, video

pytestmark = pytest.mark.vllm

BODY = chat(text("Look at"), video(90, fps=2, max_frames=4), picture(91, 320, 240))


async def test_report_contains_frames_sizes_and_tokens(ours, plain):
    await ours.succeed(BODY)
    answer = await ours.succeed({**BODY, "medialane": {"report": True}})
    report = answer.json.pop("medialane")
    clip, photo = report["items"]
    assert (clip["modality"], clip["num_frames"], len(clip["timestamps"])) == ("video", 4, 4)
    assert (photo["width"], photo["height"], photo["cache"]) == (320, 240, "hit")
    assert (clip["num_tokens"], photo["num_tokens"]) == (48, 99)  # 2x4x6 and 9x11, one for 28x28 pixels
    assert (report["stage"], report["transport"]) == ("features", "shm")
    without = await ours.succeed(BODY)
    assert "medialane" not in without.json
    assert_same(answer.json, without.json)


async def test_per_item_options_are_equivalent_to_request_options(ours, plain):
    asked = chat(text("Look at"), video(92), media_io_kwargs={"video": {"num_frames": 4}})
    own = chat(text("Look at"), video(92, num_frames=4))
    right = await plain.succeed(asked)
    assert (await ours.succeed(own)).ids == (await ours.succeed(asked)).ids == right.ids


async def test_error_says_what_was_done_until_then(ours):
    broken = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AAAA"}}
    failed = await ours.post({**chat(text("Look at"), broken), "medialane": {"report": True}})
    report = failed.json["medialane"]
    assert failed.status == 400
    assert report["request_id"] == failed.json["error"]["request_id"]
    assert report["times_ms"]["intake"] > 0
    assert "routing" not in report
