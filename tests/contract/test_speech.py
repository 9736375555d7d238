"""vLLM's endpoints for uploaded speech over our engine client: what is decoded where, and the prompts that are made."""

import json
import os

import numpy as np
import pytest
import pytest_asyncio
from app_server import KEY, Server
from tiny_families import FAMILIES
from vllm import envs
from vllm.multimodal.audio import split_audio

from medialane.gateway import wave_bytes
from medialane.testing.tiny_model import cache_folder
from medialane.types.errors import AudioTooLong, InvalidAudio, UnsupportedMediaType

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

TRANSCRIPTIONS = "/v1/audio/transcriptions"
UPLOAD = b"not audio: only the store may open it"
RATE = 16000


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running():
    family = FAMILIES["whisper"]
    server = await Server.start(str(family.build(cache_folder(os.environ))), [*family.flags, "--api-key=secret"])
    yield server
    await server.close()


@pytest.fixture
def speech(running, monkeypatch):
    from medialane.vllm_bridge.frontend import CONNECTOR

    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR)
    running.backend.reset()
    return running


async def upload(server, path=TRANSCRIPTIONS, data=UPLOAD, headers=None, **fields):
    form = {"model": server.model, "language": "en", **fields}
    return await server.client.post(
        path, data=form, files={"file": ("a.mp3", data)}, headers={**KEY, **(headers or {})}
    )


def token_ids(server, *tokens):
    return server.frontend.renderer.tokenizer.convert_tokens_to_ids(list(tokens))


async def test_upload_is_decoded_by_the_store_alone(speech):
    answer = await upload(speech)
    assert answer.status_code == 200, answer.text
    ((ref, rate),) = speech.backend.decoded
    assert (ref.data, ref.param, rate) == (UPLOAD, "file", RATE)
    (prompt,) = speech.backend.prompts
    assert prompt.is_encoder_prompt
    assert [item.data for item in prompt.items] == [wave_bytes(speech.backend.samples, RATE)]
    assert answer.json()["usage"] == {"type": "duration", "seconds": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_transcription_has_a_report_if_a_header_asks_for_it(speech, stream):
    answer = await upload(speech, headers={"X-Medialane-Report": "true"}, stream=str(stream).lower())
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    found = json.loads(events[-1] if stream else answer.text)["medialane"]
    assert found["request_id"] == answer.headers["x-request-id"]


async def test_decoder_prompt_is_sent_besides_the_encoders(speech):
    for path, task in ((TRANSCRIPTIONS, "<|transcribe|>"), ("/v1/audio/translations", "<|translate|>")):
        speech.backend.reset()
        assert (await upload(speech, path)).status_code == 200
        (request,), (prepared,) = speech.backend.requests, speech.backend.prepared
        wanted = token_ids(speech, "<|startoftranscript|>", "<|en|>", task, "<|notimestamps|>")
        assert request.prompt.token_ids == wanted
        assert prepared.encoder_token_ids == [0] * prepared.features[0].placeholder.length


async def test_long_audio_is_cut_where_vllm_cuts_it(speech):
    samples = np.random.default_rng(0).standard_normal(75 * RATE).astype(np.float32)
    speech.backend.samples = samples * np.repeat(np.linspace(0.1, 1, 75), RATE).astype(np.float32)
    assert (await upload(speech)).status_code == 200
    clips = split_audio(speech.backend.samples, RATE, 30, 1, 1600)
    found = [item.data for prompt in speech.backend.prompts for item in prompt.items]
    assert len(found) == 3
    assert sorted(found) == sorted(wave_bytes(clip, RATE) for clip in clips)


async def test_language_is_detected_by_a_request_of_its_own(speech):
    speech.backend.tokens = token_ids(speech, "<|de|>")
    answer = await upload(speech, language="", response_format="verbose_json")
    assert answer.status_code == 400  # an empty language is none that vLLM knows
    form = {"model": speech.model}
    answer = await speech.client.post(TRANSCRIPTIONS, data=form, files={"file": ("a", UPLOAD)}, headers=KEY)
    assert answer.status_code == 200, answer.text
    detecting, transcribing = [request.prompt.token_ids for request in speech.backend.requests]
    assert detecting == token_ids(speech, "<|startoftranscript|>")
    assert transcribing[1] == token_ids(speech, "<|de|>")[0]


async def test_audio_that_cannot_be_decoded_is_the_clients_error(speech):
    speech.backend.error, speech.backend.error_at = InvalidAudio("it is damaged", param="file"), "decode"
    answer = await upload(speech)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    assert answer.json()["error"]["message"] == "it is damaged"


@pytest.mark.parametrize("error", [AudioTooLong, UnsupportedMediaType])
async def test_file_that_is_not_accepted_gets_vllms_status(speech, error):
    speech.backend.error, speech.backend.error_at = error("not this one", param="file"), "decode"
    answer = await upload(speech)
    found = answer.json()["error"]
    assert (answer.status_code, found["message"], found["param"]) == (400, "not this one", "file")


async def test_files_are_limited_by_vllms_variable(speech, monkeypatch):
    monkeypatch.setenv("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "1")
    envs.disable_envs_cache()
    assert (await upload(speech, data=bytes(1 << 20))).status_code == 200
    answer = await upload(speech, data=bytes((1 << 20) + 1))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    assert len(speech.backend.decoded) == 1


async def test_file_that_intake_has_not_extracted_is_not_decoded(speech):
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nmedialane:0\r\n--b--\r\n'
    headers = {**KEY, "content-type": "application/x-www-form-urlencoded"}
    answer = await speech.client.post(TRANSCRIPTIONS, content=body, headers=headers)
    assert answer.status_code in (400, 422)
    assert not speech.backend.decoded


async def test_model_for_transcription_only_has_no_chat(speech):
    chat = {"model": speech.model, "messages": [{"role": "user", "content": "hello"}]}
    assert (await speech.client.post("/v1/chat/completions", json=chat, headers=KEY)).status_code == 404


async def test_model_without_transcription_has_no_such_endpoint(server):
    assert (await upload(server)).status_code == 404


async def test_transcription_in_real_time_is_refused_clearly(server):
    """For every model: without a route, the handshake of the WebSocket would be answered by 403."""
    headers = [(b"authorization", b"Bearer secret")]
    extensions = {"websocket.http.response": {}}
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": headers, "extensions": extensions}
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    await server.app(scope | {"query_string": b"", "subprotocols": []}, receive, send)
    start, body = sent
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 501)
    assert "/v1/audio/transcriptions" in json.loads(body["body"])["error"]["message"]
