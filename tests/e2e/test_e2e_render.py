"""`medialane render` beside plain vLLM: the tokens, placeholders and hashes of its render endpoint, and the hashes that
its engine reports in KV events."""

import asyncio
import base64
import json
import os
from io import BytesIO
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from medialane_process import FORKING_VLLM, ONE_PROCESS_ENGINE, MedialaneProcess, free_port
from openai_http import CHAT, data_url, image, text
from picture_server import picture_server
from PIL import Image
from tiny_families import CHECKED
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from audio_maker import by_libsndfile, tones
from medialane.testing.sample_media import sample_jpeg
from medialane.testing.tiny_model import cache_folder
from medialane.tools.check import plain_vllm as start_plain_vllm
from video_clips import clip, jpegs

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

RENDER = f"{CHAT}/render"
#: What `capture.go` there has sent.
LLM_D_CALLS = Path(__file__).with_name("llm_d")
FLAGS = (
    "--enforce-eager",
    "--skip-mm-profiling",
    "--max-model-len=8192",
    '--limit-mm-per-prompt={"image": {"count": 4, "width": 56, "height": 56}, "video": {"count": 2, "width": 56, '
    '"height": 56, "num_frames": 4}, "audio": {"count": 2}}',
    "--trust-request-mm-kwargs",
    "--enable-scale-out",
    "--served-model-name=omni",
    f"--kv-cache-memory-bytes={256 << 20}",
)
#: Only full blocks are reported.
TAIL = text("and then say what it is, in a few words. " * 24)


def encoded(mode, kind, seed, **options):
    pixels = np.random.default_rng(seed).integers(0, 256, (84, 112, 3), dtype=np.uint8)
    out = BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, kind, **options)
    return out.getvalue()


def exif(tag, value):
    made = Image.Exif()
    made[tag] = value
    return made


def picture(data, media_type="image/jpeg", **fields):
    return {**image(data_url(data, media_type)), **fields}


def video(data, media_type="video/mp4", **fields):
    url = f"data:{media_type};base64,{data.decode() if media_type == 'video/jpeg' else base64.b64encode(data).decode()}"
    return {"type": "video_url", "video_url": {"url": url}, **fields}


def audio(data, kind):
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}


def noise(seed):
    return clip(
        24, draw=lambda n, w, h: np.random.default_rng(seed + n).integers(0, 256, (h, w, 3), np.uint8),
        options={"qp": "1"},
    )  # fmt: skip


#: Content parts, and other fields of the body.
CASES = {
    "jpeg": ([picture(sample_jpeg(1, 200, 120))], {}),
    "png with alpha": ([picture(encoded("RGBA", "PNG", 2), "image/png")], {}),
    "grey jpeg": ([picture(encoded("L", "JPEG", 3))], {}),
    "gif": ([picture(encoded("P", "GIF", 4), "image/gif")], {}),
    "webp": ([picture(encoded("RGB", "WEBP", 5), "image/webp")], {}),
    "turned by EXIF": ([picture(encoded("RGB", "JPEG", 6, exif=exif(0x0112, 6)))], {}),
    "EXIF with an ImageID": ([picture(encoded("RGB", "JPEG", 7, exif=exif(0x800D, "0" * 32)))], {}),
    "processor options": (
        [picture(sample_jpeg(8, 200, 120))],
        {"mm_processor_kwargs": {"max_pixels": 12544, "min_pixels": 3136}},
    ),
    "decoding options": ([picture(sample_jpeg(9, 200, 120))], {"media_io_kwargs": {"image": {"image_mode": "RGB"}}}),
    "uuid": ([picture(sample_jpeg(10, 200, 120), uuid="picture-of-the-client")], {}),
    "uuid with options": (
        [picture(sample_jpeg(11, 200, 120), uuid="another-picture")],
        {"mm_processor_kwargs": {"max_pixels": 12544}},
    ),
    "salt": ([picture(sample_jpeg(12, 200, 120))], {"cache_salt": "tenant"}),
    "video": ([video(clip(30, size=(160, 120), fps=10))], {}),
    "video with options": (
        [video(clip(32, size=(160, 120), fps=10))],
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
    ),
    "video with frames smaller than its file": ([video(noise(1))], {"media_io_kwargs": {"video": {"num_frames": 4}}}),
    "video of jpeg frames": ([video(jpegs(4), "video/jpeg")], {}),
    "audio": ([audio(by_libsndfile(tones(16000, 1, 0.9), 16000, "WAV"), "wav")], {}),
    "audio that is resampled": ([audio(by_libsndfile(tones(44100, 2, 0.8), 44100, "FLAC"), "flac")], {}),
    "several": (
        [
            picture(sample_jpeg(13, 120, 90)),
            audio(by_libsndfile(tones(22050, 1, 0.6), 22050, "WAV"), "wav"),
            picture(sample_jpeg(14, 90, 160), uuid="second"),
            video(clip(20, size=(128, 96), fps=10)),
        ],
        {},
    ),
}


@pytest.fixture(scope="module")
def model():
    return str(CHECKED["qwen2_5_omni"].build(cache_folder(os.environ)))


class Engine:
    """Plain vLLM, and the identifiers of media in the blocks that it has stored."""

    def __init__(self, base_url, socket):
        self.base_url = base_url
        self._socket = socket
        self._batches = msgspec.msgpack.Decoder(KVEventBatch)

    async def reported(self, num_hashes):
        """Return the identifiers in the events since the last call, in their order: this many, unless others come."""
        found = {}
        async with asyncio.timeout(20):
            while len(found) < num_hashes:
                _topic, _number, payload = await self._socket.recv_multipart()
                for event in self._batches.decode(payload).events:
                    keys = event.extra_keys or () if isinstance(event, BlockStored) else ()
                    pairs = [key for block in keys for key in block or () if isinstance(key, list | tuple)]
                    found |= dict.fromkeys(identifier for identifier, _offset in pairs)
        return list(found)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model, vllm_environ, tmp_path_factory, starting_render):
    port = free_port()
    # vLLM binds to an endpoint with an asterisk, and connects to others.
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    flags = (*FLAGS, ONE_PROCESS_ENGINE, f"--kv-events-config={json.dumps(events)}")
    log = tmp_path_factory.mktemp("plain") / "server.log"
    environ = {**vllm_environ, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    async with start_plain_vllm(model, flags, environ=environ, log=log, program=FORKING_VLLM) as server:
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(f"tcp://127.0.0.1:{port}")
            yield Engine(server.base_url.removesuffix("/v1"), socket)
            socket.setsockopt(zmq.LINGER, 0)


@pytest.fixture(scope="module")
def starting_render(model, vllm_environ, runtime_directory, tmp_path_factory):
    """Beside the engine."""
    process = MedialaneProcess.spawn(
        "render",
        model,
        ["--preparers", "1", "--arena-size", "128MiB", "--allow-media-network", "127.0.0.0/8"],
        [flag for flag in FLAGS if flag != "--enable-scale-out"],
        environ={**vllm_environ, "XDG_RUNTIME_DIR": str(runtime_directory)},
        log=tmp_path_factory.mktemp("render") / "render.log",
    )
    yield process
    assert process.stop() == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def render(engine, starting_render):
    await starting_render.answers()
    return starting_render.base_url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


def body(parts, **fields):
    messages = [{"role": "user", "content": [text("Look. "), *parts, TAIL]}]
    return {"model": "omni", "messages": messages, "mm_payload": "none", **fields}


async def post(http, url, document):
    async with http.post(url, json=document) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def check(http, engine, render, document):
    """Compare with plain vLLM's endpoint, then with the events of its engine."""
    ours = await post(http, render + RENDER, document)
    theirs = await post(http, engine.base_url + RENDER, document)
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["features"] == theirs["features"]
    hashes = {each for hashes in ours["features"]["mm_hashes"].values() for each in hashes}
    del document["mm_payload"]
    await post(http, engine.base_url + CHAT, {**document, "max_tokens": 1})
    assert set(await engine.reported(len(hashes))) == hashes
    return hashes


@pytest.mark.parametrize("case", CASES)
async def test_tokens_places_and_hashes_are_those_of_plain_vllm_and_of_its_kv_events(http, engine, render, case):
    parts, fields = CASES[case]
    hashes = await check(http, engine, render, body(parts, **fields))
    assert len(hashes) == len(parts)


async def test_media_of_urls_have_the_hashes_of_their_bytes(http, engine, render):
    pictures = {"a.jpg": sample_jpeg(20, 180, 120), "b.png": encoded("RGBA", "PNG", 21)}
    async with picture_server(pictures) as server:
        parts = [image(server.url(name)) for name in pictures]
        hashes = await check(http, engine, render, body(parts))
        assert len(hashes) == 2
        again = await post(http, render + RENDER, body(parts))
    inline = await post(http, render + RENDER, body([picture(data) for data in pictures.values()]))
    assert set(again["features"]["mm_hashes"]["image"]) == set(inline["features"]["mm_hashes"]["image"]) == hashes


async def test_media_that_were_sent_once_have_the_hashes_of_their_bytes(http, engine, render):
    datas, parts = [sample_jpeg(22, 180, 120), encoded("RGBA", "PNG", 23)], []
    for data in datas:
        async with http.put(f"{render}/medialane/v1/media", data=data) as response:
            parts.append(image(f"medialane:media/{(await response.json())['hash']}"))
    theirs = await post(http, engine.base_url + RENDER, body(list(map(picture, datas))))
    for fields in ({}, {"cache_salt": "of the request"}):
        ours = await post(http, render + RENDER, body(parts, **fields))
        assert (ours["token_ids"], ours["features"]) == (theirs["token_ids"], theirs["features"])


async def test_server_without_an_engine_refuses_to_generate(http, render):
    for path in (CHAT, "/v1/completions", "/inference/v1/generate"):
        async with http.post(render + path, json=body([])) as response:
            assert response.status == 501
            assert "needs an engine" in (await response.json())["error"]["message"]


async def test_models_and_tokens_are_answered(http, render):
    async with http.get(f"{render}/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["omni"]
    tokens = await post(http, f"{render}/tokenize", {"model": "omni", "prompt": "hello"})
    assert tokens["count"] == len(tokens["tokens"]) > 0


def as_llm_d_reads(answer):
    """What `vllm_http.go` of llm-d decodes of an answer."""
    features = answer["features"] or {}
    places = {
        modality: [(place["offset"], place["length"]) for place in each]
        for modality, each in (features.get("mm_placeholders") or {}).items()
    }
    return answer["token_ids"], features.get("mm_hashes"), places


async def replayed(base_url, name, num_calls=1):
    """The JSON answers to a call of llm-d, sent byte by byte as its client has sent it, on one connection."""
    sent = (LLM_D_CALLS / name).read_bytes()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(base_url.rpartition(":")[2]))
    answers = []
    async with asyncio.timeout(60):
        for _ in range(num_calls):
            writer.write(sent)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            assert head[0].startswith("http/1.1 200")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            assert "content-encoding" not in headers
            body = b""
            if "content-length" in headers:
                body = await reader.readexactly(int(headers["content-length"]))
            while "content-length" not in headers and (size := int(await reader.readuntil(b"\r\n"), 16)) >= 0:
                body += (await reader.readexactly(size + 2))[:-2]
                if not size:
                    break
            answers.append(json.loads(body))
    writer.close()
    await writer.wait_closed()
    return answers


async def test_call_of_llm_d_for_a_chat_is_answered_as_by_plain_vllm(engine, render):
    first, again = await replayed(render, "chat.http", num_calls=2)
    (theirs,) = await replayed(engine.base_url, "chat.http")
    assert as_llm_d_reads(first) == as_llm_d_reads(again) == as_llm_d_reads(theirs)
    assert len(as_llm_d_reads(first)[1]["image"]) == 1
    assert first["features"]["kwargs_data"] is None  # which nothing of llm-d reads here


async def test_call_of_llm_d_for_completions_is_answered_as_by_plain_vllm(engine, render):
    (ours,), (theirs,) = [await replayed(url, "completions.http") for url in (render, engine.base_url)]
    assert [each["token_ids"] for each in ours] == [each["token_ids"] for each in theirs]
    assert len(ours) == 2
