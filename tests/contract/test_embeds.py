"""Client embeddings give the same input as vLLM's chat parser; wrongly shaped ones reach no engine."""

import base64
import io

import msgspec
import pytest
import pytest_asyncio
import torch
from prompt_maker import PromptMaker, request
from vllm.renderers.chat_utils import parse_chat_messages_async

from medialane.media import read_embeds
from medialane.types.errors import InvalidEmbeds, InvalidFeature
from medialane.types.feature import MediaPayload
from medialane.types.request import UnexpandedPrompt
from medialane.types.tensor import EMBEDS_TYPE, UNNAMED, InlineTensor, TensorSpec, decode_embeds
from medialane.vllm_bridge.engine.unexpanded_prompt import AcceptedEmbeds, EmbedsReader
from medialane.vllm_bridge.learned import ModelProfile
from model_parts import unexpanded_renderer
from vllm_configs import renderer_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

VLLM_ARGS = [
    "--max-model-len=8192",
    "--enforce-eager",
    "--skip-mm-profiling",
    '--limit-mm-per-prompt={"image":8,"video":1}',
    "--mm-processor-cache-gb=0",
    "--enable-mm-embeds",
]
HIDDEN = 128

#: What the trial at start finds for this model (`test_family_embeddings`).
ACCEPTED = AcceptedEmbeds(fields=["image_embeds", "image_grid_thw"], width=HIDDEN, fault="")
PARAM = "messages[0].content[0].image_embeds"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def embeds_renderer(tiny_model):
    renderer = renderer_of(tiny_model, VLLM_ARGS)
    yield renderer
    renderer.shutdown()


@pytest.fixture
def source(embeds_renderer):
    source = unexpanded_renderer(embeds_renderer, ModelProfile(embeds_renderer.get_mm_processor()))
    source.accept_embeds(ACCEPTED)
    yield source
    source.close()


def saved(tensor) -> str:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def values(rows, hidden=HIDDEN, dtype=torch.bfloat16, seed=0):
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def payload(grid, *, dtype=torch.bfloat16, as_list=False, seed=0):
    """Return the embeddings of a client for an image of this grid."""
    rows = grid[0] * grid[1] * grid[2] // 4
    numbers = list(grid) if as_list else saved(torch.tensor(grid))
    return {"image_embeds": saved(values(rows, dtype=dtype, seed=seed)), "image_grid_thw": numbers}


def handed(fields, key="k", modality="image") -> MediaPayload:
    raw = fields if isinstance(fields, dict) else {UNNAMED: fields}
    given = {n: v.encode() if isinstance(v, str) else msgspec.Raw(msgspec.json.encode(v)) for n, v in raw.items()}
    data = read_embeds(given, PARAM, 1 << 24)
    tensor = InlineTensor(TensorSpec("uint8", (len(data),)), data)
    return MediaPayload(modality, key, b"", (tensor,), media_type=EMBEDS_TYPE, param=PARAM)


async def rendered(source, renderer, *items, **options):
    token_ids = PromptMaker(renderer).token_ids(len(items))
    prompt = UnexpandedPrompt(token_ids, items, **options)
    return await source.render(request("r", prompt), prompt, [[memoryview(item.tensors[0].data)] for item in items])


async def vllms_own(renderer, *payloads):
    """The engine input of vLLM's chat parser and renderer."""
    content = [{"type": "image_embeds", "image_embeds": payload} for payload in payloads]
    _, data, _ = await parse_chat_messages_async(
        [{"role": "user", "content": content}], renderer.model_config, content_format="openai"
    )
    token_ids = PromptMaker(renderer).token_ids(len(payloads))
    (found,) = await renderer.render_cmpl_async([{"prompt_token_ids": token_ids, "multi_modal_data": data}])
    return found


def tensors_of(engine_input):
    return [{name: elem.data for name, elem in item.items()} for item in engine_input["mm_kwargs"]["image"]]


SENT = {
    "one image": [payload((1, 4, 6))],
    "grid as numbers": [payload((1, 4, 6), as_list=True)],
    "of another type": [payload((1, 4, 6), dtype=torch.float32)],
    "two of one size": [payload((1, 4, 6)), payload((1, 4, 6), seed=1)],
    "two of different sizes": [payload((1, 4, 6)), payload((1, 8, 2), seed=1)],
    "two of different lengths": [payload((1, 4, 6)), payload((1, 2, 2), seed=1), payload((1, 10, 8), seed=2)],
    "several frames": [payload((3, 4, 6))],
}


@pytest.mark.parametrize("name", SENT)
async def test_engine_input_equals_plain_vllms(source, embeds_renderer, name):
    items = [handed(fields, f"key-{n}") for n, fields in enumerate(SENT[name])]
    found = await rendered(source, embeds_renderer, *items)
    wanted = await vllms_own(embeds_renderer, *SENT[name])
    assert found["prompt_token_ids"] == wanted["prompt_token_ids"]
    assert found["mm_placeholders"] == wanted["mm_placeholders"]
    assert found["mm_hashes"] == {"image": [item.mm_hash for item in items]}
    for ours, theirs in zip(tensors_of(found), tensors_of(wanted), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert all(ours[name].dtype == theirs[name].dtype for name in theirs)


async def test_one_dimensional_grid_is_accepted(source, embeds_renderer):
    fields = payload((1, 4, 6)) | {"image_grid_thw": saved(torch.tensor([[1, 4, 6]]))}
    (ours,) = tensors_of(await rendered(source, embeds_renderer, handed(fields)))
    assert ours["image_grid_thw"].tolist() == [1, 4, 6]


async def test_leading_batch_dimension_of_one_is_accepted(source, embeds_renderer):
    fields = payload((1, 4, 6)) | {"image_embeds": saved(values(6)[None])}
    (ours,) = tensors_of(await rendered(source, embeds_renderer, handed(fields)))
    assert torch.equal(ours["image_embeds"], values(6))


WRONG = {
    "one tensor": saved(values(6)),
    "no grid": {"image_embeds": saved(values(6))},
    "another field": payload((1, 4, 6)) | {"pixel_values": saved(values(6))},
    "pixels": {"pixel_values": saved(values(24, 1176)), "image_grid_thw": [1, 4, 6]},
    "too few rows": payload((1, 4, 6)) | {"image_embeds": saved(values(5))},
    "too many rows": payload((1, 4, 6)) | {"image_embeds": saved(values(7))},
    "another hidden size": payload((1, 4, 6)) | {"image_embeds": saved(values(6, 64))},
    "one dimension": payload((1, 4, 6)) | {"image_embeds": saved(values(6).view(-1))},
    "four dimensions": payload((1, 4, 6)) | {"image_embeds": saved(values(6)[None, None])},
    "a batch of two": payload((1, 4, 6)) | {"image_embeds": saved(torch.stack([values(3), values(3)]))},
    "whole numbers": payload((1, 4, 6)) | {"image_embeds": saved(values(6).to(torch.int64))},
    "grid of two": payload((1, 4, 6)) | {"image_grid_thw": [4, 6]},
    "grid of fractions": payload((1, 4, 6)) | {"image_grid_thw": [1.0, 4.0, 6.0]},
    "negative grid": payload((1, 4, 6)) | {"image_grid_thw": [-1, -4, 6]},
    "zero grid": payload((1, 4, 6)) | {"image_grid_thw": [0, 4, 6]},
    "odd grid": payload((1, 4, 6)) | {"image_grid_thw": [1, 3, 8]},
    "grid of an int32": payload((1, 4, 6)) | {"image_grid_thw": saved(torch.tensor([1, 4, 6], dtype=torch.int32))},
    "huge grid": payload((1, 4, 6)) | {"image_grid_thw": [1 << 20, 1 << 20, 1 << 20]},
    "grid that overflows": payload((1, 4, 6)) | {"image_grid_thw": [1, 1 << 62, 1 << 62]},
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrongly_shaped_embeddings_are_rejected_before_vllm(source, embeds_renderer, monkeypatch, name):
    monkeypatch.setattr(embeds_renderer, "render_cmpl_async", None)  # fails its caller
    with pytest.raises(InvalidEmbeds) as raised:
        await rendered(source, embeds_renderer, handed(WRONG[name]))
    assert raised.value.param == PARAM


@pytest.mark.parametrize("modality", ["audio", "video"])
async def test_embeddings_for_an_untested_model_family_are_rejected(source, embeds_renderer, modality):
    with pytest.raises(InvalidEmbeds, match=f"{modality}_embeds"):
        await rendered(source, embeds_renderer, handed(payload((1, 4, 6)), modality=modality))


async def test_invalid_embedding_bytes_are_rejected(source, embeds_renderer):
    tensor = InlineTensor(TensorSpec("uint8", (3,)), b"abc")
    item = MediaPayload("image", "k", b"", (tensor,), media_type=EMBEDS_TYPE, param=PARAM)
    with pytest.raises(InvalidFeature):
        await rendered(source, embeds_renderer, item)


async def test_worker_without_the_flag_rejects_embeddings(renderer):
    reader = EmbedsReader(ModelProfile(renderer.get_mm_processor()), ACCEPTED)
    data = handed(payload((1, 4, 6))).tensors[0].data
    with pytest.raises(InvalidEmbeds, match="--enable-mm-embeds"):
        reader.read("image", decode_embeds(data))


async def test_renderer_output_is_validated_against_the_placeholders(source, embeds_renderer):
    found = await rendered(source, embeds_renderer, handed(payload((1, 4, 6))))
    reader = EmbedsReader(ModelProfile(embeds_renderer.get_mm_processor()), ACCEPTED)
    reader.check("image", found, 1)
    with pytest.raises(InvalidEmbeds):
        reader.check("image", found, 2)
    found["mm_kwargs"]["image"][0]["image_embeds"].data = values(5)
    with pytest.raises(InvalidEmbeds):
        reader.check("image", found, 1)


@pytest.mark.parametrize(
    "accepted", [None, AcceptedEmbeds(fields=[], width=0, fault="it raises")], ids=["untried", "no"]
)
async def test_model_that_does_not_accept_embeddings_gets_none(embeds_renderer, accepted):
    reader = EmbedsReader(ModelProfile(embeds_renderer.get_mm_processor()), accepted)
    data = handed(payload((1, 4, 6))).tensors[0].data
    with pytest.raises(InvalidEmbeds, match="image_embeds of this model"):
        reader.read("image", decode_embeds(data))


async def test_width_of_embeddings_is_the_encoders(embeds_renderer):
    """Qwen3-VL's embeddings are wider than the language model."""
    wide = AcceptedEmbeds(fields=[UNNAMED], width=256, fault="")
    reader = EmbedsReader(ModelProfile(embeds_renderer.get_mm_processor()), wide)
    found = reader.read("image", decode_embeds(handed(saved(values(6, 256))).tensors[0].data))
    assert torch.equal(found[UNNAMED], values(6, 256))
    with pytest.raises(InvalidEmbeds, match="256"):
        reader.read("image", decode_embeds(handed(saved(values(6))).tensors[0].data))
