"""Rollouts of one image as TRL makes them: render the images alone, put them into a prompt of own ids, and generate
n times.

TRL's `VLLMClient` does the same against a vLLM server (`image_features`, then `/inference/v1/generate`). Against
medialane with `--enable-scale-out` the image is sent once and processed once, whatever n is. With
`--payload references` the n requests carry 80 bytes for it instead of its tensors, and the tensors for training are
read from the arena (`--store`, on the same host) or by HTTP: they are those of the engine.

The first rollout is streamed, and the others start with its first token: by then the image is encoded and the prompt is
in the KV cache, so no other worker does it again. With `--at-once` all start together, as TRL has them.

    python trl_style_rollout.py http://localhost:8000 MODEL photo.jpg --payload references --store unix:PATH
"""

import argparse
import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import requests
import safetensors.torch
from PIL import Image
from transformers import AutoProcessor

import medialane.client

TIMEOUT_S = 300


class Server:
    """vLLM's endpoints for trainers, and the number of bytes sent to each."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._base_url = base_url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.sent_bytes: dict[str, int] = {}

    def post(self, path: str, body: dict) -> dict:
        data = json.dumps(body).encode()
        self.sent_bytes[path] = self.sent_bytes.get(path, 0) + len(data)
        headers = {**self._headers, "Content-Type": "application/json"}
        answer = requests.post(self._base_url + path, data=data, headers=headers, timeout=TIMEOUT_S)
        answer.raise_for_status()
        return answer.json()

    def stream(self, path: str, body: dict) -> Iterator[dict]:
        """Yield the events of a streamed answer."""
        data = json.dumps({**body, "stream": True}).encode()
        self.sent_bytes[path] = self.sent_bytes.get(path, 0) + len(data)
        headers = {**self._headers, "Content-Type": "application/json"}
        url = self._base_url + path
        with requests.post(url, data=data, headers=headers, timeout=TIMEOUT_S, stream=True) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def tensors(self, mm_hash: str) -> dict:
        path = f"{self._base_url}/medialane/v1/features/{mm_hash}"
        answer = requests.get(path, headers=self._headers, timeout=TIMEOUT_S)
        answer.raise_for_status()
        return safetensors.torch.load(answer.content)


def image_features(server: Server, model: str, image: bytes, payload: str) -> dict:
    """Render the image alone. Returns hashes, and its tensors or a reference to them."""
    url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    body = {"model": model, "messages": [message], "max_tokens": 1, "mm_payload": payload}
    return server.post("/v1/chat/completions/render", body)["features"]


def runs(token_ids: list[int], token: int) -> Iterator[dict[str, int]]:
    """Yield the ranges of a token: where the images are."""
    start = None
    for number, one in enumerate([*token_ids, None]):
        if one == token and start is None:
            start = number
        elif one != token and start is not None:
            yield {"offset": start, "length": number - start}
            start = None


def generate(server: Server, bodies: list[dict], *, at_once: bool) -> list[list[int]]:
    """Return the token ids of an answer to each request."""

    def rollout(body: dict) -> list[int]:
        return ids_in(server.post("/inference/v1/generate", body))

    with ThreadPoolExecutor(len(bodies)) as pool:
        if at_once:
            return list(pool.map(rollout, bodies))
        stream = server.stream("/inference/v1/generate", bodies[0])
        first = ids_in(next(stream))
        others = [pool.submit(rollout, body) for body in bodies[1:]]
        for event in stream:
            first += ids_in(event)
        return [first, *(other.result() for other in others)]


def ids_in(answer: dict) -> list[int]:
    """Return the token ids of an answer, or of an event of one."""
    return [token for choice in answer["choices"] for token in choice["token_ids"] or ()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base_url")
    parser.add_argument("model", help="a folder or a name on a hub: the processor is loaded from it")
    parser.add_argument("image")
    parser.add_argument("--served-model-name", help="by default the same as the model")
    parser.add_argument("--api-key")
    parser.add_argument("--question", default="Describe the picture.")
    parser.add_argument("--payload", choices=["tensors", "references"], default="tensors")
    parser.add_argument("--store", help="the store's socket, if this is its host")
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--at-once", action="store_true", help="start all rollouts together")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    model = args.served_model_name or args.model
    server = Server(args.base_url, args.api_key)

    # What the trainer computes for itself: ids with an expanded placeholder, and Hugging Face's tensors.
    processor = AutoProcessor.from_pretrained(args.model)
    content = [{"type": "image", "image": Image.open(args.image)}, {"type": "text", "text": args.question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
    )
    token_ids = inputs["input_ids"][0].tolist()

    with open(args.image, "rb") as file:
        features = image_features(server, model, file.read(), args.payload)
    features["mm_placeholders"] = {"image": list(runs(token_ids, processor.image_token_id))}

    def body(seed: int) -> dict:
        sampling = {"temperature": args.temperature, "seed": seed, "max_tokens": args.max_tokens}
        return {"model": model, "token_ids": token_ids, "features": features, "sampling_params": sampling}

    rollouts = generate(server, [body(seed) for seed in range(args.n)], at_once=args.at_once)

    (mm_hash,) = features["mm_hashes"]["image"]
    if args.store:
        with medialane.client.features([mm_hash], store=args.store) as held:
            shapes = {name: list(tensor.shape) for name, tensor in held[mm_hash].items()}
    else:
        shapes = {name: list(tensor.shape) for name, tensor in server.tensors(mm_hash).items()}
    print(json.dumps({"rollouts": rollouts, "tensors": shapes, "sent_bytes": server.sent_bytes}))


if __name__ == "__main__":
    main()
