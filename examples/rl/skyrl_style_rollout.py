"""Rollouts of one image as SkyRL makes them: render it in a throw-away message, splice its run of placeholder tokens
into own ids, generate n times at once; in the next turn render it again.

SkyRL's `RemoteInferenceClient` does the same against vLLM with a render server of its own and without a processor
cache, since a repeated render of vLLM returns null `kwargs_data`. medialane is both servers, processes the image once,
and returns the tensors on every render. Point SkyRL's inference server and render server URLs at it.

The first rollout is streamed, and the others start with its first token: by then the image is encoded and the prompt is
in the KV cache, so no other worker does it again. With `--at-once` all start together, as SkyRL has them.

    python skyrl_style_rollout.py http://localhost:8000 MODEL photo.jpg
"""

import argparse
import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from transformers import AutoTokenizer

TIMEOUT = aiohttp.ClientTimeout(total=300)


class Server:
    """vLLM's endpoints for trainers, and the number of bytes sent to each."""

    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self._session = session
        self._model = model
        self.sent_bytes: dict[str, int] = {}

    async def post(self, path: str, body: dict) -> dict:
        data = json.dumps({"model": self._model, **body}).encode()
        self.sent_bytes[path] = self.sent_bytes.get(path, 0) + len(data)
        async with self._session.post(path, data=data, headers={"Content-Type": "application/json"}) as answer:
            answer.raise_for_status()
            return await answer.json()

    async def stream(self, path: str, body: dict) -> AsyncIterator[dict]:
        """Yield the events of a streamed answer."""
        data = json.dumps({"model": self._model, **body, "stream": True}).encode()
        self.sent_bytes[path] = self.sent_bytes.get(path, 0) + len(data)
        async with self._session.post(path, data=data, headers={"Content-Type": "application/json"}) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    async def render(self, image: bytes, payload: str) -> dict:
        """Return tokens and features of a message that has only the image."""
        url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
        message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        return await self.post("/v1/chat/completions/render", {"messages": [message], "mm_payload": payload})


def splice(token_ids: list[int], rendered: dict) -> tuple[list[int], dict]:
    """Replace the image's one token in a prompt by the run of the rendered message. Returns ids and features."""
    (place,) = rendered["features"]["mm_placeholders"]["image"]
    run = rendered["token_ids"][place["offset"] : place["offset"] + place["length"]]
    at = token_ids.index(run[0])
    places = {"image": [{"offset": at, "length": len(run)}]}
    return [*token_ids[:at], *run, *token_ids[at + 1 :]], {**rendered["features"], "mm_placeholders": places}


async def turn(server: Server, conversation: list[int], image: bytes, args: argparse.Namespace) -> list[list[int]]:
    """Return the token ids of n answers to a conversation with the image."""
    rendered = await server.render(image, args.payload)
    (entry,) = rendered["features"]["kwargs_data"]["image"]
    assert entry is not None, "the server's processor cache has kept the tensors"
    token_ids, features = splice(conversation, rendered)

    def body(seed: int) -> dict:
        sampling = {"temperature": args.temperature, "seed": seed, "max_tokens": args.max_tokens}
        return {"token_ids": token_ids, "features": features, "sampling_params": sampling}

    async def rollout(seed: int) -> list[int]:
        return ids_in(await server.post("/inference/v1/generate", body(seed)))

    if args.at_once:
        return list(await asyncio.gather(*(rollout(seed) for seed in range(args.n))))
    stream = server.stream("/inference/v1/generate", body(0))
    first = ids_in(await anext(stream))
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(rollout(seed)) for seed in range(1, args.n)]
        async for event in stream:
            first += ids_in(event)
    return [first, *(other.result() for other in others)]


def ids_in(answer: dict) -> list[int]:
    """Return the token ids of an answer, or of an event of one."""
    return [token for choice in answer["choices"] for token in choice["token_ids"] or ()]


async def run(args: argparse.Namespace, image: bytes) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": args.question}]}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    conversation = tokenizer.encode(prompt, add_special_tokens=False)
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    async with aiohttp.ClientSession(args.base_url, headers=headers, timeout=TIMEOUT) as session:
        server = Server(session, args.served_model_name or args.model)
        first = await turn(server, conversation, image, args)
        follow_up = tokenizer.encode("\nAnd what else?", add_special_tokens=False)
        second = await turn(server, [*conversation, *first[0], *follow_up], image, args)
    return {"rollouts": first, "next_turn": second, "sent_bytes": server.sent_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base_url")
    parser.add_argument("model", help="a folder or a name on a hub: the tokenizer is loaded from it")
    parser.add_argument("image")
    parser.add_argument("--served-model-name", help="by default the same as the model")
    parser.add_argument("--api-key")
    parser.add_argument("--question", default="Describe the picture.")
    parser.add_argument("--payload", choices=["tensors", "references"], default="tensors")
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--at-once", action="store_true", help="start all rollouts together")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(run(args, Path(args.image).read_bytes()))))


if __name__ == "__main__":
    main()
