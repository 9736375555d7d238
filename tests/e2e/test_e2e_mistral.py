"""Models in Mistral's own format, whose tokenizer opens the media of a chat: through gateway and worker, answers equal
plain vLLM's, and the tokenizer opens nothing of a client's."""

import base64
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from medialane_process import FORKING_VLLM, ONE_PROCESS_ENGINE, START_S, MedialaneProcess
from openai_http import OpenAiHttp, assert_same, chat, data_url, image, photo, picture, text
from picture_server import PictureServer, picture_server
from tiny_families import FAMILIES

from audio_maker import tone
from medialane.testing.tiny_model import TINY_MODEL_ENVIRON, cache_folder
from medialane.tools.check import plain_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

FLAGS = ("--workers", "1", "--preparers", "1", "--arena-size", "256MiB", "--allow-media-network", "127.0.0.0/8")
ASK = text("What do you make of it?")

TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@dataclass(frozen=True)
class Servers:
    """Clients of two servers of one model, and a web server of its media."""

    name: str
    ours: OpenAiHttp
    plain: OpenAiHttp
    web: PictureServer

    @property
    def is_audio(self) -> bool:
        return "audio" in FAMILIES[self.name].limits


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["mistral_small", "voxtral"])
async def servers(request, tmp_path_factory):
    family = FAMILIES[request.param]
    model, logs = str(family.build(cache_folder(os.environ))), tmp_path_factory.mktemp(family.name)
    runtime = Path(tempfile.mkdtemp(prefix="ml-mis-"))
    environ = {**TINY_MODEL_ENVIRON, **os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    vllm_flags = family.flags
    ours = MedialaneProcess.spawn("serve", model, FLAGS, vllm_flags, environ=environ, log=logs / "serve.log")
    plain_flags = (*vllm_flags, ONE_PROCESS_ENGINE)
    files = {"0.jpg": photo(0), "1.jpg": photo(1, 301, 422), "0.wav": tone(440, 1.5), "1.wav": tone(620, 2.3)}
    try:
        async with (
            plain_vllm(
                model, plain_flags, environ=environ, log=logs / "plain.log", start_s=START_S, program=FORKING_VLLM
            ) as plain,
            picture_server(files) as web,
        ):
            await ours.answers()
            base_url = plain.base_url.removesuffix("/v1")
            yield Servers(family.name, OpenAiHttp(ours.base_url, model), OpenAiHttp(base_url, model), web)
    finally:
        ours.stop()
        shutil.rmtree(runtime)


def item(servers: Servers, number: int, *, by_url: bool = False):
    """The media item of this number, of the modality that the model has."""
    if by_url:
        kind, name = ("audio_url", f"{number}.wav") if servers.is_audio else ("image_url", f"{number}.jpg")
        return {"type": kind, kind: {"url": servers.web.url(name)}}
    if not servers.is_audio:
        return picture(number, 200 + 130 * number, 330 - 60 * number)
    data = tone(300 + 170 * number, 1.5 + 15 * number)
    if number % 2:
        return {"type": "audio_url", "audio_url": {"url": data_url(data, "audio/wav")}}
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def talk(*messages, **options):
    return {**chat(**options), "messages": list(messages)}


def user(*content):
    return {"role": "user", "content": list(content)}


def bodies(servers: Servers):
    one, two = (item(servers, number) for number in (0, 2))
    return {
        "one": chat(one, ASK),
        "after text": chat(text("Look at"), two),
        "two with text between": chat(text("Look:"), one, text("and"), two, ASK),
        "the other order": chat(two, one, ASK),
        "the same twice": chat(one, text("and"), one, ASK),
        "by URL": chat(item(servers, 0, by_url=True), text("and"), item(servers, 1, by_url=True), ASK),
        "a system message": talk({"role": "system", "content": "Be brief."}, user(one, ASK)),
        "a system message of parts": talk({"role": "system", "content": [text("Be brief.")]}, user(one, ASK)),
        "several turns": talk(
            user(one, ASK), {"role": "assistant", "content": "A harbour."}, user(text("And"), two, text("?"))
        ),
        "two messages of one role": talk(user(one), user(text("Or"), two)),
        "tools": talk(
            user(one, ASK),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "A pier."},
            {"role": "assistant", "content": "I see."},
            user(two, ASK),
            tools=[TOOL],
        ),
        "a prefix": talk(
            user(one, ASK),
            {"role": "assistant", "content": "It is"},
            add_generation_prompt=False,
            continue_final_message=True,
        ),
        "text only": chat(text("Say something.")),
        "logprobs": chat(one, ASK, logprobs=True, top_logprobs=3),
        "a stream": chat(one, ASK, stream=True),
    }


NAMES = (
    "one", "after text", "two with text between", "the other order", "the same twice", "by URL", "a system message",
    "a system message of parts", "several turns", "two messages of one role", "tools", "a prefix", "text only",
    "logprobs", "a stream",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
async def test_answer_equals_plain_vllm(servers, name):
    body = bodies(servers)[name]
    answer, right = await servers.ours.succeed(body), await servers.plain.succeed(body)
    assert answer.ids == right.ids
    if right.json is not None:
        assert_same(answer.json, right.json)


async def test_media_are_processed_once_and_sent_as_features(servers):
    part = item(servers, 1)
    await servers.ours.succeed(chat(part, ASK))
    asked = chat(text("Once more:"), part, text("Well?"))
    answer = await servers.ours.succeed({**asked, "medialane": {"report": True}})
    report = answer.json.pop("medialane")
    assert (report["stage"], report["transport"], report["items"][0]["cache"]) == ("features", "shm", "hit")
    assert_same(answer.json, (await servers.plain.succeed(asked)).json)
    assert (await servers.ours.metrics()).value("medialane_transfer_fallbacks_total") == 0


async def test_item_can_be_sent_by_its_uuid_alone(servers):
    part = item(servers, 1, by_url=True)
    kind = part["type"]
    first = await servers.ours.succeed(chat({**part, "uuid": "mine"}, ASK))
    again = await servers.ours.succeed(chat({"type": kind, kind: None, "uuid": "mine"}, ASK))
    assert again.ids == first.ids


def refused(servers: Servers):
    kind = "audio_url" if servers.is_audio else "image_url"
    url = servers.web.url("0.wav" if servers.is_audio else "0.jpg")
    spare = servers.web.url("spare")
    return {
        "not media": {"type": kind, kind: {"url": data_url(b"not media at all", "image/png")}},
        "a private address": {"type": kind, kind: {"url": "http://169.254.169.254/latest/meta-data"}},
        "a local file": {"type": kind, kind: {"url": "file:///etc/hostname"}},
        "our own reference": {"type": kind, kind: {"url": "medialane:0"}},
        "embeddings": {"type": "image_embeds", "image_embeds": "AAAA"},
        "an image of transformers": {"type": "image", "url": spare},
        "an image of transformers with a URL": {"type": "image", "url": spare, kind: {"url": url}, "uuid": "u"},
        "a path of transformers": {"type": "image", "path": "/etc/hostname"},
        "audio of transformers": {"type": "audio", "url": spare},
        "a tool for vLLM": {"type": "audio", "url": spare, "tool_reference": "x", "name": "x", "uuid": "u"},
        "another item in a text": {"type": "text", "text": "x", kind: {"url": url}, "uuid": "u"},
        "no type": {kind: {"url": url}},
        "nothing": {"type": kind, kind: None},
    }


REFUSED = (
    "not media", "a private address", "a local file", "our own reference", "embeddings", "an image of transformers",
    "an image of transformers with a URL", "a path of transformers", "audio of transformers",
    "a tool for vLLM",
    "another item in a text", "no type", "nothing",
)  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_item_that_is_not_accepted_fails_its_request_alone(servers, name):
    answer = await servers.ours.post(chat(refused(servers)[name], ASK))
    assert answer.status == 400, answer.json
    assert servers.web.num_requests["spare"] == 0
    body = chat(item(servers, 0), ASK)
    assert (await servers.ours.succeed(body)).ids == (await servers.plain.succeed(body)).ids


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/tokenize"])
async def test_other_apis_give_the_same_output(servers, path):
    if servers.is_audio:
        pytest.skip("they have no audio")
    url = item(servers, 0)["image_url"]["url"]
    source = {"type": "base64", "media_type": "image/jpeg", "data": url.rpartition(",")[2]}
    body = {
        "/v1/responses": {
            "input": [user({"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is it?"})],
            "max_output_tokens": 8,
            "temperature": 0,
        },
        "/v1/messages": {
            "messages": [user({"type": "image", "source": source}, ASK)],
            "max_tokens": 8,
            "temperature": 0,
        },
        "/tokenize": {"messages": [user(image(url), ASK)]},
    }[path]
    answer, right = await servers.ours.post(body, path), await servers.plain.post(body, path)
    # vLLM hands parts of the Responses API to the tokenizer as they are, which does not know them.
    assert answer.status == right.status == (400 if path == "/v1/responses" else 200)
    if answer.status == 200:
        assert_same(answer.json, right.json)
