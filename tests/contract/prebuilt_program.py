"""Gateways' front ends that answer the same requests, from a fork of a process that has built one and from a fork of
one that has only imported vLLM: `python prebuilt_program.py MODEL`.

Prints JSON: the answers of each kind, whether each has built its parts itself, and the number of threads of the process
after it has built. Both get their key only after the fork.
"""

import asyncio
import contextlib
import json
import os
import re
import sys

from app_server import BASE64, DATA_URL, KEY, Server, image

from medialane.gateway.intake import warm_up
from medialane.runtime.linux import exit_at_once
from medialane.vllm_bridge.frontend import CONNECTOR, app

FLAGS = ["--max-model-len=8192", "--enforce-eager", '--limit-mm-per-prompt={"image":8,"video":1}', "--enable-mm-embeds"]
POOLING = [*FLAGS, "--runner=pooling"]
#: What differs between two answers to one request of one server.
VARYING = (r'"created(_at)?":\d+', r"[0-9a-f]{16,}", r"\d{10,}(\.\d+)?", r'"age":\d+')


def requests(server):
    chat, text = "/v1/chat/completions", server.body()
    yield chat, text, KEY
    yield chat, text, {}  # without a key
    yield chat, text, {"authorization": "Bearer guessed"}
    yield chat, server.body(image(DATA_URL), logprobs=True, top_logprobs=2), KEY
    yield chat, server.body(image(DATA_URL), image("http://host.example/a.png"), stream=True), KEY
    yield chat, server.body(max_tokens=-1), KEY
    yield chat, server.body(temperature="hot"), KEY
    yield chat, server.body(*[image(DATA_URL)] * 9), KEY
    yield "/v1/completions", {"model": server.model, "prompt": ["a", "b"], "max_tokens": 3}, KEY
    yield "/v1/responses", {"model": server.model, "input": "hello", "store": False}, KEY
    yield "/v1/messages", {"model": server.model, "max_tokens": 3, "messages": text["messages"]}, KEY
    yield "/tokenize", {"model": server.model, "prompt": "a photograph"}, KEY
    yield "/v1/embeddings", {"model": server.model, "input": ["a", "b"]}, KEY
    yield "/pooling", {"model": server.model, "input": "a", "encoding_format": "base64"}, KEY
    yield "/v1/embeddings", {"model": server.model, "messages": [{"role": "user", "content": [image(BASE64)]}]}, KEY
    yield "/abort_requests", {}, KEY


async def answers(model, flags, tasks):
    server = await Server.start(model, flags, tasks)
    server.client.headers.pop("authorization")
    found = []
    try:
        for path in ("/v1/models", "/openapi.json", "/health", "/nowhere"):
            response = await server.client.get(path, headers=KEY)
            found.append(shown(response))
        for path, body, headers in requests(server):
            response = await server.client.post(path, json=body, headers=headers)
            found.append(shown(response))
    finally:
        await server.close()
    return found


def shown(response):
    text = response.text
    for pattern in VARYING:
        text = re.sub(pattern, "*", text)
    return [response.request.url.path, response.status_code, response.headers.get("content-type"), text]


def answers_of_fork(model, flags, tasks):
    """Run in a fork, which gets its key and our connector after it has left this process."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.environ |= {"VLLM_API_KEY": "secret", "VLLM_MEDIA_CONNECTOR": CONNECTOR}
        built, build = [], app.build_frontend
        app.build_frontend = lambda *args: (built.append(args), build(*args))
        result = asyncio.run(answers(model, flags, tasks))
        with open(writer, "w") as pipe:
            json.dump({"answers": result, "has_built": bool(built)}, pipe)
        exit_at_once(0)
    os.close(writer)
    with open(reader) as pipe:
        return json.load(pipe)


def main(model):
    os.environ |= {"TOKENIZERS_PARALLELISM": "false"}
    warm_up()
    kinds = {"text": (FLAGS, None), "pooling": (POOLING, ("embed", "token_embed"))}
    cold = {kind: answers_of_fork(model, *given) for kind, given in kinds.items()}
    for flags, _ in kinds.values():
        app.build_frontend(model, flags)
    num_threads = len(os.listdir("/proc/self/task"))
    warm = {kind: answers_of_fork(model, *given) for kind, given in kinds.items()}
    other = answers_of_fork(model, [*FLAGS, "--served-model-name=other"], None)
    return {"cold": cold, "warm": warm, "other": other["has_built"], "num_threads": num_threads}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = main(sys.argv[1])
    json.dump(result, sys.stdout)
    exit_at_once(0)
