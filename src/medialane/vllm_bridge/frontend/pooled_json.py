"""Writes the floats of a pooling response as JSON in small pieces.

Python's encoder writes a whole document in one call, during which no other thread runs, nor the event loop: 0.7 s for a
million floats, such as the embeddings of all tokens of a page. So vLLM builds the response for empty tensors, and their
floats are inserted in its text, which is the same then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from starlette.responses import JSONResponse, Response
from vllm.outputs import PoolingOutput, PoolingRequestOutput

#: Encoded in 3 ms.
PIECE_FLOATS = 4096

#: An empty tensor in the text of a response, without its brackets. No JSON string contains unescaped quotes.
_MEMBERS = (b'"embedding":', b'"data":')

Build = Callable[[Any], Response]


def built_in_pieces(build: Build) -> Build:
    """Return a function that gives the same responses as vLLM's `build`, which gets the context of a request."""

    def built(context: Any) -> Response:
        outputs: list[PoolingRequestOutput] = context.final_res_batch
        is_float = getattr(context.request, "encoding_format", None) == "float"
        if not is_float or sum(output.outputs.data.numel() for output in outputs) <= PIECE_FLOATS:
            return build(context)
        context.final_res_batch = list(map(_emptied, outputs))
        response = build(context)
        context.final_res_batch = outputs
        body = _filled(bytes(response.body), outputs) if type(response) is JSONResponse else None
        return build(context) if body is None else Response(body, media_type="application/json")

    return built


def _emptied(output: PoolingRequestOutput) -> PoolingRequestOutput:
    return PoolingRequestOutput(
        output.request_id,
        PoolingOutput(torch.empty(0)),
        output.prompt_token_ids,
        output.num_cached_tokens,
        output.finished,
    )


def _filled(body: bytes, outputs: Sequence[PoolingRequestOutput]) -> bytes | None:
    """Return the body with the floats of `outputs` in place of its empty lists; None if it has not one for each."""
    for member in _MEMBERS:
        first, *rest = body.split(member + b"[]")
        if len(rest) == len(outputs):
            pieces = [first]
            for output, after in zip(outputs, rest, strict=True):
                pieces += [member, *_json(output.outputs.data), after]
            return b"".join(pieces)
    return None


def _json(data: torch.Tensor) -> Iterator[bytes]:
    """Yield the nested lists of a tensor of at least one dimension."""
    yield b"["
    if data.ndim > 1:
        for number, row in enumerate(data):
            yield b"," if number else b""
            yield from _json(row)
    else:
        for start in range(0, len(data), PIECE_FLOATS):
            piece = json.dumps(data[start : start + PIECE_FLOATS].tolist(), separators=(",", ":"), allow_nan=False)
            yield (("," if start else "") + piece[1:-1]).encode()
    yield b"]"
