"""`medialane serve --prefill 1 --decode 1`: answers are plain vLLM's, and each prompt is computed once.

vLLM's ExampleConnector keeps KV blocks in files, by the content of the prompt: a block of another prompt or item would
change the answer. It cannot be combined with a prefix cache: it counts tokens that are cached there as negative. NIXL
moves blocks from one process to the other by the parameters that gateways pass on.
"""

import asyncio
import json
import os
import sys
from contextlib import ExitStack, suppress

import aiohttp
import pytest
import pytest_asyncio
from kept_blocks import LEASE_S, nothing_is_kept
from medialane_process import FORKING_VLLM, ONE_PROCESS_ENGINE, START_S, MedialaneProcess, kill
from openai_http import OpenAiHttp, assert_same, chat, data_url, picture, text, video
from process_tree import descendants, resident_bytes_of_arenas, suspended
from shared_servers import LOG_FLAGS, MEDIA_FLAGS, SERVER_FLAGS, STORE_FLAGS, running_store_apart
from tiny_families import FAMILIES

from adapter_files import FLAGS as ADAPTER_FLAGS
from adapter_files import write_adapter
from medialane.testing.sample_media import sample_pdf
from medialane.testing.tiny_model import cache_folder
from medialane.tools.check import plain_vllm as start_plain_vllm
from medialane.tools.check.media import as_images
from waiting import eventually

pytestmark = pytest.mark.vllm

#: More than a block, so that one with all of the media is transferred.
ASK = text("What is to be seen, in all of it? " * 20)
SCHEMA = {"type": "object", "properties": {"colour": {"type": "string", "maxLength": 8}}, "required": ["colour"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
#: Tokens of a KV block on a CPU: ExampleConnector transfers whole ones, and not the last of a prompt.
BLOCK = 128

NUM_LEAVING = 40

#: What the kernel maps around a page that is read, at most.
MAPPED_AROUND = 64 << 10

BODIES = {
    "text": chat(text("a long text without media " * 60)),
    "image": chat(picture(700), ASK),
    "other image": chat(picture(701), ASK),
    "two images": chat(picture(702), picture(703, 640, 200), ASK),
    "two images in the other order": chat(picture(703, 640, 200), picture(702), ASK),
    "image twice": chat(picture(704), picture(704), ASK),
    "video": chat(video(705), ASK),
    "image and video": chat(picture(706), video(707), ASK),
    "log probabilities": chat(picture(708), ASK, logprobs=True, top_logprobs=3),
    "of the prompt": chat(picture(709), ASK, prompt_logprobs=1),
    "seed": chat(picture(710), ASK, temperature=0.8, seed=3),
    "penalties": chat(picture(711), ASK, presence_penalty=0.6, frequency_penalty=0.4),
    "stop string": chat(picture(712), ASK, stop=["e"]),
    "grammar": chat(picture(713), ASK, response_format=FORMAT),
    "tool": chat(picture(714), ASK, tools=[TOOL], tool_choice="required", max_tokens=40),
    "two choices": chat(picture(716), ASK, n=2, temperature=0.8, seed=5),
    "salt": chat(picture(715), ASK, cache_salt="salt"),
}


def example_connector(folder):
    extra = {"shared_storage_path": str(folder / "blocks")}
    config = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    # It saves what the first step has computed as if that were the whole prompt.
    whole = ["--no-enable-prefix-caching", "--max-num-batched-tokens=8192"]
    return [*whole, "--kv-transfer-config", json.dumps(config)]


#: vLLM's flags. Without any, the command chooses NIXL.
CONNECTORS = {"example": example_connector, "nixl": lambda _folder: []}


WITH_ADAPTER = [chat(picture(760), ASK), chat(text("a long text for an adapter " * 60))]


@pytest.fixture(scope="session")
def adapter(tmp_path_factory):
    return f"adapter={write_adapter(tmp_path_factory.mktemp('adapters') / 'adapter', 1)}"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def right_with_adapter(adapter, tiny_model, vllm_environ, tmp_path_factory):
    """The answers of a plain vLLM."""
    log = tmp_path_factory.mktemp("plain") / "server.log"
    flags = (*SERVER_FLAGS, *ADAPTER_FLAGS, ONE_PROCESS_ENGINE, "--lora-modules", adapter)
    async with start_plain_vllm(str(tiny_model), flags, environ=vllm_environ, log=log, program=FORKING_VLLM) as server:
        client = OpenAiHttp(server.base_url.removesuffix("/v1"), "adapter")
        return [(await client.succeed(body)).json for body in WITH_ADAPTER]


@pytest.fixture(scope="module", params=CONNECTORS)
def connector(request):
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def split_serve(vllm_flags, tiny_model, plain_vllm, vllm_environ, runtime_directory, tmp_path_factory):
    """The command, with each connector."""
    process = MedialaneProcess.spawn(
        "serve",
        str(tiny_model),
        ["--prefill", "1", "--decode", "1", "--prefill-at", "prefill", "--verbose", *LOG_FLAGS, *STORE_FLAGS],
        vllm_flags,
        environ={**vllm_environ, "XDG_RUNTIME_DIR": str(runtime_directory)},
        log=tmp_path_factory.mktemp("prefill") / "serve.log",
    )
    await process.answers()
    client = OpenAiHttp(process.base_url, process.model)
    await eventually(lambda: both_ready(client), "both workers are ready", START_S)
    yield process
    process.stop()


@pytest.fixture(scope="module")
def vllm_flags(connector, adapter, server_flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    return [*server_flags, *ADAPTER_FLAGS, "--lora-modules", adapter, *CONNECTORS[connector](folder)]


@pytest.fixture(scope="module")
def split(split_serve) -> OpenAiHttp:
    return OpenAiHttp(split_serve.base_url, split_serve.model)


async def num_ready(client, number):
    return (await client.metrics()).value("medialane_worker_state", state="ready") == number


async def both_ready(client):
    return await num_ready(client, 2)


async def outcomes(client):
    return (await client.metrics()).by("medialane_prefills_total", "outcome")


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_answer_is_plain_vllms_and_its_prompt_was_transferred(split, plain, body):
    answer = await split.succeed({**body, "medialane": {"report": True}})
    found = answer.json.pop("medialane")["prefill"]
    assert found["outcome"] == "split"
    num_tokens = answer.json["usage"]["prompt_tokens"]
    assert found["transferred_tokens"] >= max(1, num_tokens - 2 * BLOCK), "all but the last blocks"
    assert_same(answer.json, (await plain.succeed(body)).json)


async def test_document_is_answered_as_its_pages(split, plain):
    pdf = sample_pdf(["page 1 of a paper\nwith two lines", "page 2"], width=298, height=420)
    part = {"type": "file", "file": {"file_data": data_url(pdf, "application/pdf"), "dpi": 96}}
    answer = await split.succeed({**chat(part, ASK), "medialane": {"report": True}})
    assert answer.json.pop("medialane")["prefill"]["transferred_tokens"] > 2 * BLOCK
    assert_same(answer.json, (await plain.succeed(chat(*as_images([part]), ASK))).json)


@pytest.mark.timeout(600)
async def test_adapter_is_the_same_on_both_workers(split_serve, right_with_adapter):
    client = OpenAiHttp(split_serve.base_url, "adapter")
    for body, right in zip(WITH_ADAPTER, right_with_adapter, strict=True):
        answer = await client.succeed({**body, "medialane": {"report": True}})
        assert answer.json.pop("medialane")["prefill"]["transferred_tokens"] > 0
        assert_same(answer.json, right)


async def test_stream_is_plain_vllms(split, plain):
    body = chat(picture(720), ASK, stream=True, stream_options={"include_usage": True})
    answer, right = await split.succeed(body), await plain.succeed(body)
    assert (answer.ids, answer.content) == (right.ids, right.content)
    assert answer.events[-1]["usage"]["prompt_tokens"] == right.events[-1]["usage"]["prompt_tokens"]
    assert (await outcomes(split))["split"] > 0


async def test_prompt_is_computed_by_the_worker_that_prefills_alone(split):
    """vLLM counts at each worker which tokens it has computed, and which it has read."""
    before = await computed(split)
    answer = await split.succeed(chat(picture(730), picture(731), ASK))
    after, num_tokens = await computed(split), answer.json["usage"]["prompt_tokens"]
    assert after["prefill"] - before["prefill"] == num_tokens
    assert after["decode"] - before["decode"] <= 2 * BLOCK < num_tokens


async def test_worker_of_the_answer_reads_no_tensor(split_serve, split):
    """It maps the pages with the first words of each entry, in each of its processes, and no others."""
    names = split_serve.named_workers()
    pids = {
        role: split_serve.worker_pid(next(name for name in names if role in name)) for role in ("prefill", "decode")
    }

    def resident(role: str) -> int:
        return sum(map(resident_bytes_of_arenas, (pids[role], *descendants(pids[role]))))

    await split.succeed(chat(picture(734), ASK))  # both have mapped the arena
    before = {role: resident(role) for role in pids}
    answer = await split.succeed({**chat(picture(735, 1024, 768), ASK), "medialane": {"report": True}})
    assert answer.json["medialane"]["prefill"]["transferred_tokens"] > 0
    grown = {role: resident(role) - before[role] for role in pids}
    assert grown["prefill"] > 10 * MAPPED_AROUND, grown
    assert grown["decode"] <= 2 * MAPPED_AROUND, grown


async def computed(client):
    """Prompt tokens that the workers have computed, by role."""
    page = await client.metrics()
    labels = [s.labels for s in page.samples if s.name == "medialane_worker_role" and s.value]
    name = "vllm:prompt_tokens_by_source_total"
    return {each["role"]: page.value(name, worker=each["worker"], source="local_compute") for each in labels}


async def test_completion_of_text_is_plain_vllms(split, plain):
    body = {"prompt": "once upon a time " * 60, "max_tokens": 8, "temperature": 0, "prompt_logprobs": 1, "logprobs": 2}
    before = (await outcomes(split)).get("split", 0)
    ours, right = [await client.succeed(body, "/v1/completions") for client in (split, plain)]
    assert_same(ours.json, right.json)
    assert (await outcomes(split))["split"] == before + 1


#: Of a gateway whose store is another one: the worker of the answer gets no media, but for the last two.
ELSEWHERE = {
    "image": chat(picture(780), ASK),
    "two images": chat(picture(781), picture(782, 640, 200), ASK),
    "video": chat(video(783), ASK),
    "two choices": chat(picture(784), ASK, n=2, temperature=0.8, seed=5),
    "grammar": chat(picture(785), ASK, response_format=FORMAT),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def apart(connector, split_serve, vllm_flags, vllm_environ, tmp_path_factory):
    """A client of a gateway with the same workers."""
    if connector != "nixl":
        pytest.skip("of the product's connector")
    folder = tmp_path_factory.mktemp("apart")
    workers = [word for named in split_serve.named_workers().items() for word in ("--worker", "=".join(named))]
    with running_store_apart(split_serve.model, environ=vllm_environ, log=folder / "store.log") as store:
        flags = [*workers, *store, "--prefill-at", "prefill", *MEDIA_FLAGS]
        process = MedialaneProcess.spawn(
            "gateway", split_serve.model, flags, vllm_flags, environ=vllm_environ, log=folder / "gateway.log"
        )
        await process.answers()
        client = OpenAiHttp(process.base_url, process.model)
        await eventually(lambda: both_ready(client), "it has both workers", START_S)
        yield client
        process.stop()


@pytest.mark.parametrize("body", ELSEWHERE.values(), ids=ELSEWHERE)
async def test_answer_is_plain_vllms_if_its_media_are_on_another_host(apart, plain, body):
    answer = await apart.succeed({**body, "medialane": {"report": True}})
    report = answer.json.pop("medialane")
    assert (report["transport"], report["prefill"]["outcome"]) == ("pull", "split")
    assert report["prefill"]["transferred_tokens"] > BLOCK
    assert_same(answer.json, (await plain.succeed(body)).json)


async def test_parameters_of_clients_reach_no_connector(split, plain):
    """They could name any host."""
    theirs = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_host": "203.0.113.1", "remote_port": 1}
    body = chat(picture(750), ASK)
    answer = await split.succeed({**body, "kv_transfer_params": theirs})
    assert_same(answer.json, (await plain.succeed(body)).json)


@pytest.fixture
def nixl(connector, split):
    """Files of ExampleConnector outlive everybody, and a half-written one counts as whole."""
    if connector != "nixl":
        pytest.skip("of the product's connector")
    return split


async def test_clients_that_leave_leave_no_blocks_behind(nixl, plain):
    """In each step of their requests, and sooner than leases end."""
    expired = (await nixl.metrics()).value("vllm:nixl_num_kv_expired_reqs_total")
    for number in range(NUM_LEAVING):
        asking = asyncio.create_task(nixl.post(chat(picture(800 + number), ASK, max_tokens=100, ignore_eos=True)))
        await asyncio.sleep(number * 0.02)  # time: so far
        asking.cancel()
        await asyncio.wait([asking])
    await nothing_is_kept(nixl, LEASE_S / 2)
    assert (await nixl.metrics()).value("vllm:nixl_num_kv_expired_reqs_total") == expired
    body = chat(picture(799), ASK)
    assert_same((await nixl.succeed(body)).json, (await plain.succeed(body)).json)


@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_killed_worker_costs_no_answer(split_serve, nixl, plain, role, after_s):
    seed = 900 + 100 * (role == "decode") + int(100 * after_s)
    bodies = [chat(picture(seed + number), ASK, max_tokens=40, ignore_eos=True) for number in range(6)]
    expected = [(await plain.succeed(body)).json for body in bodies]
    asking = [asyncio.create_task(nixl.succeed(body)) for body in bodies]
    await asyncio.sleep(after_s)  # time: their requests are in different steps
    (name,) = [name for name in split_serve.named_workers() if role in name]
    kill(split_serve.worker_pid(name))
    for answer, right in zip(await asyncio.gather(*asking), expected, strict=True):
        assert_same(answer.json, right)
    await eventually(lambda: both_ready(nixl), "the killed worker is back", START_S)
    await nothing_is_kept(nixl, 2 * LEASE_S)


async def tried(client, body):
    """The answer, or None if the connection was lost."""
    with suppress(aiohttp.ClientError):
        return await client.post(body)


@pytest.mark.parametrize("after_s", [0.05, 0.4])
@pytest.mark.parametrize("victim", ["gateway", "store"])
async def test_killed_gateway_or_store_leaves_no_wrong_answer_and_no_blocks(split_serve, nixl, plain, victim, after_s):
    """A killed gateway costs its own requests; without a store, media that are not at a worker yet are refused."""
    seed = 1200 + 100 * (victim == "store") + int(100 * after_s)
    bodies = [chat(picture(seed + number), ASK, max_tokens=40, ignore_eos=True) for number in range(6)]
    expected = [(await plain.succeed(body)).json for body in bodies]
    asking = [asyncio.create_task(tried(nixl, body)) for body in bodies]
    await asyncio.sleep(after_s)  # time: their requests are in different steps
    kill(split_serve.gateway_pid() if victim == "gateway" else split_serve.store_pid())
    for answer, right in zip(await asyncio.gather(*asking), expected, strict=True):
        if answer is None or answer.status != 200:
            assert victim == "gateway" or (answer.status, answer.error["code"]) == (503, "media_store_unavailable")
        else:
            assert_same(answer.json, right)
    await split_serve.answers()
    await eventually(lambda: both_ready(nixl), "both workers are connected", START_S)
    await nothing_is_kept(nixl, 2 * LEASE_S)

    async def answers_again():
        return (await nixl.post(bodies[0])).status == 200

    await eventually(answers_again, "it answers", START_S)
    assert_same((await nixl.succeed(bodies[0])).json, expected[0])


async def test_worker_that_hangs_with_blocks_costs_time_alone(split_serve, nixl, plain):
    """The other one has just started, and asks it in vain where its blocks are."""
    body = chat(picture(1500), ASK)
    expected = (await plain.succeed(body)).json
    names = split_serve.named_workers()
    prefill, decode = (next(name for name in names if role in name) for role in ("prefill", "decode"))
    kill(split_serve.worker_pid(decode))
    await eventually(lambda: num_ready(nixl, 1), "one is lost", START_S)
    await eventually(lambda: both_ready(nixl), "it is back", START_S)
    before = (await outcomes(nixl)).get("split", 0)

    async def is_computed():
        return (await outcomes(nixl)).get("split", 0) > before

    with ExitStack() as hangs:
        with suspended(*descendants(split_serve.worker_pid(decode))):
            asking = asyncio.create_task(nixl.post({**body, "medialane": {"report": True}}))
            await eventually(is_computed, "its prompt is computed", 60)
            hangs.enter_context(suspended(*descendants(split_serve.worker_pid(prefill))))
        answer = await asking
    found = answer.json.pop("medialane")["prefill"]
    assert_same(answer.json, expected)
    assert (found["outcome"], found.get("transferred_tokens", 0)) == ("split", 0)
    await eventually(lambda: both_ready(nixl), "both go on", START_S)
    await nothing_is_kept(nixl, 2 * LEASE_S)


@pytest.mark.timeout(900)
async def test_check_finds_that_audio_is_answered_as_by_one_worker(vllm_environ, runtime_directory, tmp_path):
    """And that each prompt was read from the worker that has computed it."""
    family, report = FAMILIES["qwen3_asr"], tmp_path / "report.json"
    flags = ["--prefill-decode", "--routing-split-tokens", "1", "--quick", "--only", "audio", "--json", str(report)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "medialane", "check", str(family.build(cache_folder(os.environ)))),
        *(*flags, "--preparers", "1", "--arena-size", "256MiB", "--", *family.flags, "--max-model-len=512"),
        env={**vllm_environ, "XDG_RUNTIME_DIR": str(runtime_directory)},
        stdout=asyncio.subprocess.PIPE,
    )
    shown, _ = await process.communicate()
    assert process.returncode == 0, shown.decode()
    results = json.loads(report.read_bytes())["results"]
    split = [each for each in results if each.get("prefill") == "split"]
    assert len(split) > 1
    assert all(each["transferred_tokens"] for each in split)
