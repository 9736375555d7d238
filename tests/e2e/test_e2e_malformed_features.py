"""Inconsistent features sent directly to a worker: rejected before they could terminate EngineCore.

Each time, a valid request on the same connection succeeds afterwards.
"""

import asyncio
import io
import secrets
from dataclasses import dataclass, field

import msgspec
import pytest
import pytest_asyncio
import torch
from openai_http import chat, photo, picture, text
from PIL import Image as PILImage

from medialane.arena import ENTRY_HEADER_BYTES, describe, layout
from medialane.gateway.workers import RpcClient
from medialane.store import FindItem, StoreLink
from medialane.types.errors import HandoverFailed, InvalidFeature, MedialaneError, PromptRejected
from medialane.types.feature import MediaPayload, PlaceholderRange
from medialane.types.hashing import content_hash
from medialane.types.media import Image, MediaRef, MediaSize
from medialane.types.request import EngineRequest, ExpandedPrompt
from medialane.types.tensor import InlineTensor, TensorDescriptor, TensorSpec
from medialane.wire import Hello, RpcConfig
from waiting import eventually

pytestmark = pytest.mark.vllm

IMAGE_PAD = 6
BODY = chat(picture(120), text("Describe the picture."))
TWO = chat(picture(120), picture(121), text("Compare the pictures."))


@pytest.fixture(scope="module")
def processor(serve):
    """The processor that preparers run."""
    from model_parts import preparers_processor

    return preparers_processor(serve.model)


def pixels(seed):
    import numpy as np

    return np.array(PILImage.open(io.BytesIO(photo(seed))).convert("RGB"))


@dataclass
class Sender:
    """A test gateway connected to one worker and to the store, in whose arena it writes what it should not."""

    client: RpcClient
    store: StoreLink
    processor: object
    holds: list[int] = field(default_factory=list)

    def item(self, seed=120):
        return self.processor.process(Image(pixels(seed)), b"{}")

    async def feature(self, item, place, way, key=None):
        """`item` as transmitted."""
        tensors = await self.stored(item) if way == "shm" else inline(item)
        return MediaPayload("image", key or secrets.token_hex(32), item.header, tensors, item.size, place)

    async def stored(self, item) -> tuple[TensorDescriptor, ...]:
        """Write the tensors over an entry that the connection to the store holds: the pixels of a plain picture."""
        (*_, num_bytes) = layout(item.specs)
        picture = plain_picture(num_bytes)
        ref = MediaRef("image", "p", content=content_hash(picture))

        async def send(question) -> None:
            self.store.payload(question.range)[: len(picture)] = picture

        found = await self.store.call(lambda call: FindItem(call, ref, "decoded", b"{}", len(picture)), send)
        self.holds.append(found.hold_id)
        tensors = describe(found.range, item.specs)
        payload = self.store.payload(found.range)
        for tensor, data in zip(tensors, item.buffers, strict=True):
            start = tensor.offset - ENTRY_HEADER_BYTES
            payload[start : start + tensor.spec.nbytes] = data
        return tensors

    async def answer(self, prompt) -> list[int]:
        """Return the worker's output token ids. Raises the worker's rejection."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.serial_utils import MsgpackEncoder

        params = SamplingParams(
            temperature=0, max_tokens=BODY["max_tokens"], ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        (encoded,) = MsgpackEncoder().encode(params)
        remote = self.client.requests.submit(EngineRequest(secrets.token_hex(8), prompt, bytes(encoded)))
        return [token async for delta in remote for token in delta.completions[0].token_ids]


def plain_picture(num_bytes: int) -> bytes:
    """A PNG of a random colour with at least this many bytes of pixels."""
    buffer = io.BytesIO()
    colour = tuple(secrets.token_bytes(3))
    PILImage.new("RGB", (1024, num_bytes // (3 * 1024) + 2), colour).save(buffer, "PNG")
    return buffer.getvalue()


def inline(item):
    return tuple(InlineTensor(spec, bytes(data)) for spec, data in zip(item.specs, item.buffers, strict=True))


@pytest_asyncio.fixture
async def sender(serve, worker_addresses, processor):
    config = RpcConfig()
    store = StoreLink(serve.store_address, rpc=config, arena_directory="/dev/shm", wait_timeout_s=10, writable=True)
    running = asyncio.create_task(store.run())
    async with asyncio.timeout(30):
        await store.ready()
    client = await RpcClient.connect(worker_addresses[0], Hello(gateway_id=secrets.token_hex(16)), config)
    await eventually(lambda: client.reports.arena == store.arena, "the worker has mapped the store's arena")
    sender = Sender(client, store, processor)
    yield sender
    await client.close()
    for hold_id in sender.holds:
        store.release(hold_id, store.arena)
    await store.refresh(5)
    running.cancel()
    await asyncio.wait([running])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def right(plain):
    """Plain vLLM's answers: (expanded prompt, output) for one image and for two."""
    answers = [await plain.succeed({**body, "ignore_eos": True}) for body in (BODY, TWO)]
    return [(answer.json["prompt_token_ids"], answer.ids) for answer in answers]


def places(token_ids) -> list[PlaceholderRange]:
    """The runs of image tokens."""
    found, start = [], None
    for position, token in enumerate([*token_ids, 0]):
        if token == IMAGE_PAD and start is None:
            start = position
        elif token != IMAGE_PAD and start is not None:
            found.append(PlaceholderRange(start, position - start))
            start = None
    return found


@pytest.mark.parametrize("way", ["shm", "inline"])
async def test_valid_features_give_plain_vllms_output(sender, right, way):
    (ids, answer), (ids_of_two, answer_of_two) = right
    (place,) = places(ids)
    assert await sender.answer(ExpandedPrompt(ids, (await sender.feature(sender.item(), place, way),))) == answer
    features = [await sender.feature(sender.item(120 + i), p, way) for i, p in enumerate(places(ids_of_two))]
    assert await sender.answer(ExpandedPrompt(ids_of_two, tuple(features))) == answer_of_two


def longer(feature, _ids):
    place = feature.placeholder
    return msgspec.structs.replace(feature, placeholder=PlaceholderRange(place.offset, place.length + 1))


def shorter(feature, _ids):
    place = feature.placeholder
    return msgspec.structs.replace(feature, placeholder=PlaceholderRange(place.offset, place.length - 1))


def shifted(feature, _ids):
    place = feature.placeholder
    return msgspec.structs.replace(feature, placeholder=PlaceholderRange(place.offset + 1, place.length))


def at_the_end(feature, ids):
    return msgspec.structs.replace(feature, placeholder=PlaceholderRange(len(ids) - 2, feature.placeholder.length))


def beyond_the_prompt(feature, ids):
    return msgspec.structs.replace(feature, placeholder=PlaceholderRange(len(ids) + 5, feature.placeholder.length))


def with_marks(feature, _ids):
    place = feature.placeholder
    marks = b"\1" * (place.length - 1) + b"\0"
    return msgspec.structs.replace(feature, placeholder=PlaceholderRange(place.offset, place.length, marks))


def of_another_size(feature, _ids):
    return msgspec.structs.replace(feature, size=MediaSize(width=28, height=28), header=b"\x80")


def without_tensors(feature, _ids):
    return msgspec.structs.replace(feature, tensors=())


def with_garbage_as_header(feature, _ids):
    return msgspec.structs.replace(feature, header=b"\xc1 garbage")


def with_a_hash_without_end(feature, _ids):
    return msgspec.structs.replace(feature, mm_hash="f" * 100_000)


MALFORMED = (
    longer,
    shorter,
    shifted,
    at_the_end,
    beyond_the_prompt,
    with_marks,
    of_another_size,
    without_tensors,
    with_garbage_as_header,
    with_a_hash_without_end,
)


@pytest.mark.parametrize("way", ["shm", "inline"])
@pytest.mark.parametrize("malform", MALFORMED)
async def test_feature_not_matching_its_prompt_is_rejected(sender, right, way, malform):
    ids, answer = right[0]
    (place,) = places(ids)
    good = await sender.feature(sender.item(), place, way)
    with pytest.raises(InvalidFeature):
        await sender.answer(ExpandedPrompt(ids, (malform(good, ids),)))
    assert await sender.answer(ExpandedPrompt(ids, (good,))) == answer


def with_field(item, name, change):
    """The processed item with one field changed and everything else consistent."""
    from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem

    from medialane.vllm_bridge.items import decode_item, encode_item

    fields = dict(decode_item(item.header, item.buffers).items())
    elem = fields[name]
    fields[name] = MultiModalFieldElem(data=change(elem.data), field=elem.field)
    header, specs, buffers = encode_item(MultiModalKwargsItem(fields))
    return type(item)(header=header, specs=specs, buffers=buffers, size=item.size)


CHANGES = {
    "fewer rows than the grid says": ("pixel_values", lambda t: t[:-4]),
    "more rows than the grid says": ("pixel_values", lambda t: torch.cat([t, t[:4]])),
    "narrower rows": ("pixel_values", lambda t: t[:, :-2]),
    "rows of another rank": ("pixel_values", lambda t: t[None]),
    "another dtype": ("pixel_values", lambda t: t.to(torch.float64)),
    "a grid of another size": ("image_grid_thw", lambda t: t + torch.tensor([0, 2, 0])),
    "a grid of as many rows": ("image_grid_thw", lambda t: t * torch.tensor([2, 1, 1])),
    "a grid of zeros": ("image_grid_thw", lambda t: t * 0),
    "a grid below zero": ("image_grid_thw", lambda t: -t),
    "a grid without end": ("image_grid_thw", lambda t: t * 1_000_000_000),
    "a grid of two numbers": ("image_grid_thw", lambda t: t[..., :2]),
    "a grid of fractions": ("image_grid_thw", lambda t: t.to(torch.float32)),
}


@pytest.mark.parametrize("way", ["shm", "inline"])
@pytest.mark.parametrize("name", CHANGES)
async def test_inconsistent_feature_is_rejected(sender, right, way, name):
    ids, answer = right[0]
    (place,) = places(ids)
    item = sender.item()
    with pytest.raises(InvalidFeature):
        await sender.answer(ExpandedPrompt(ids, (await sender.feature(with_field(item, *CHANGES[name]), place, way),)))
    assert await sender.answer(ExpandedPrompt(ids, (await sender.feature(item, place, way),))) == answer


async def test_tensor_shape_not_matching_the_header_is_rejected(sender, right):
    ids, answer = right[0]
    (place,) = places(ids)
    good = await sender.feature(sender.item(), place, "shm")
    (tensor,) = good.tensors
    rows, width = tensor.spec.shape
    smaller = TensorDescriptor(TensorSpec(tensor.spec.dtype, (rows - 4, width)), tensor.range, tensor.offset)
    with pytest.raises(InvalidFeature):
        await sender.answer(ExpandedPrompt(ids, (msgspec.structs.replace(good, tensors=(smaller,)),)))
    assert await sender.answer(ExpandedPrompt(ids, (good,))) == answer


@pytest.mark.parametrize(
    "change",
    [
        {"arena": "0" * 32},
        {"generation": 999_999},
        {"offset": 1 << 40},
        {"offset": 64},
        {"arena": "../../../etc/passwd"},
    ],
    ids=str,
)
async def test_invalid_descriptor_fails_the_hand_over(sender, right, change):
    ids, answer = right[0]
    (place,) = places(ids)
    good = await sender.feature(sender.item(), place, "shm")
    (tensor,) = good.tensors
    astray = TensorDescriptor(tensor.spec, msgspec.structs.replace(tensor.range, **change), tensor.offset)
    with pytest.raises(HandoverFailed):
        await sender.answer(ExpandedPrompt(ids, (msgspec.structs.replace(good, tensors=(astray,)),)))
    assert await sender.answer(ExpandedPrompt(ids, (good,))) == answer


async def test_misordered_or_overlapping_features_are_rejected(sender, right):
    ids, answer = right[1]
    first, second = [await sender.feature(sender.item(120 + i), p, "inline") for i, p in enumerate(places(ids))]
    on_one = msgspec.structs.replace(second, placeholder=first.placeholder)
    for wrong in ((second, first), (first, on_one), (first, first)):
        with pytest.raises(InvalidFeature):
            await sender.answer(ExpandedPrompt(ids, wrong))
    assert await sender.answer(ExpandedPrompt(ids, (first, second))) == answer


async def test_missing_or_extra_feature_is_rejected(sender, right):
    ids, answer = right[1]
    first, second = [await sender.feature(sender.item(120 + i), p, "inline") for i, p in enumerate(places(ids))]
    extra = msgspec.structs.replace(second, placeholder=PlaceholderRange(len(ids) - 3, 2))
    with pytest.raises(InvalidFeature):
        await sender.answer(ExpandedPrompt(ids, (first, second, extra)))
    assert await sender.answer(ExpandedPrompt(ids, (first, second))) == answer


async def test_unsupported_modality_is_rejected(sender, right):
    ids, answer = right[0]
    (place,) = places(ids)
    good = await sender.feature(sender.item(), place, "inline")
    with pytest.raises(PromptRejected, match="At most 0 audio"):
        await sender.answer(ExpandedPrompt(ids, (msgspec.structs.replace(good, modality="audio"),)))
    assert await sender.answer(ExpandedPrompt(ids, (good,))) == answer


async def test_out_of_vocabulary_token_ids_are_rejected(sender, right):
    ids, answer = right[0]
    (place,) = places(ids)
    good = await sender.feature(sender.item(), place, "inline")
    with pytest.raises(MedialaneError) as refused:
        await sender.answer(ExpandedPrompt([*ids, 10_000_000], (good,)))
    assert isinstance(refused.value, PromptRejected | InvalidFeature)
    assert await sender.answer(ExpandedPrompt(ids, (good,))) == answer
