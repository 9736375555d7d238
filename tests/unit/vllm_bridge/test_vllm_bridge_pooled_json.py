import json
from types import SimpleNamespace

import pytest
import torch
from starlette.responses import JSONResponse, Response
from vllm.outputs import PoolingOutput, PoolingRequestOutput

from medialane.vllm_bridge.frontend import pooling_endpoints
from medialane.vllm_bridge.frontend.pooling_endpoints import PIECE_FLOATS, built_in_pieces


def context(*tensors, encoding_format="float"):
    outputs = [PoolingRequestOutput(f"r{n}", PoolingOutput(t), [1, 2], 0, finished=True) for n, t in enumerate(tensors)]
    return SimpleNamespace(request=SimpleNamespace(encoding_format=encoding_format), final_res_batch=outputs)


def build(member):
    """A response of vLLM's form."""

    def built(ctx):
        data = [
            {"index": n, "object": member, member: output.outputs.data.tolist()}
            for n, output in enumerate(ctx.final_res_batch)
        ]
        tokens = sum(len(output.prompt_token_ids) for output in ctx.final_res_batch)
        return JSONResponse({"model": '"data":[] "embedding":[]', "data": data, "usage": {"prompt_tokens": tokens}})

    return built


TENSORS = {
    "long": [torch.randn(3 * PIECE_FLOATS + 5)],
    "of tokens": [torch.randn(300, 32), torch.randn(1, 32), torch.zeros(0, 32)],
    "many": [torch.randn(512) * 1e-6 for _ in range(20)],
}


@pytest.mark.parametrize("member", ["data", "embedding"])
@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
def test_response_is_byte_for_byte_that_of_vllm(monkeypatch, member, tensors):
    calls = []
    dumps = json.dumps
    monkeypatch.setattr(
        pooling_endpoints.json, "dumps", lambda piece, **how: calls.append(len(piece)) or dumps(piece, **how)
    )
    found, expected = built_in_pieces(build(member))(context(*tensors)), build(member)(context(*tensors))
    assert found.body == expected.body
    assert dict(found.headers) == dict(expected.headers)
    pieces = [size for size in calls if size > 3]  # the rest are vLLM's own documents
    assert max(pieces) <= PIECE_FLOATS


def test_outputs_are_the_same_afterwards():
    asked = context(torch.randn(2 * PIECE_FLOATS))
    before = list(asked.final_res_batch)
    built_in_pieces(build("data"))(asked)
    assert asked.final_res_batch == before


@pytest.mark.parametrize(
    "asked", [context(torch.randn(8)), context(torch.randn(2 * PIECE_FLOATS), encoding_format="base64")]
)
def test_other_responses_are_left_to_vllm(asked):
    response = Response()
    assert built_in_pieces(lambda found: response if found is asked else None)(asked) is response


def test_not_a_number_is_refused_as_by_vllm():
    with pytest.raises(ValueError, match="JSON"):
        built_in_pieces(build("data"))(context(torch.full((2 * PIECE_FLOATS,), torch.nan)))
