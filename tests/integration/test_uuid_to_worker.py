"""Media by their uuid, and embeddings, from the gateway's intake to what reaches an engine."""

from __future__ import annotations

import base64
import io
import json
from contextlib import aclosing

import msgspec
import numpy as np
import pytest
from gateway_parts import Parts, png

from medialane.gateway import GatewayConfig, open_scope
from medialane.gateway.intake import ExtractedMedia, extract
from medialane.media import MediaConfig
from medialane.testing.fake_processor import PLACEHOLDER_TOKEN
from medialane.types.errors import InvalidImage, UnknownMediaUuid, UuidConflict
from medialane.types.feature import MediaPrompt
from medialane.types.hashing import content_hash
from medialane.types.request import ExpandedPrompt, UnexpandedPrompt
from medialane.types.tensor import EMBEDS_TYPE, decode_embeds
from waiting import eventually

FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}
FIRST, SECOND = png(seed=1), png(90, 60, seed=2)


@pytest.fixture
def seen(worker):
    """Records the prompt of each request at the engine, and its bytes."""
    seen, generate = [], worker.engine.generate

    async def spied(request, tensors, embeddings):
        seen.append((request.prompt, [[bytes(data) for data in item] for item in tensors]))
        async with aclosing(generate(request, tensors, embeddings)) as deltas:
            async for delta in deltas:
                yield delta

    worker.engine.generate = spied
    return seen


def image(data=None, uuid=None, **options):
    url = data and "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url, **options}, **({} if uuid is None else {"uuid": uuid})}


def embeds(seed=0, **more):
    buffer = io.BytesIO()
    np.save(buffer, np.random.default_rng(seed).random((6, 8), np.float32))
    tensor = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_embeds", "image_embeds": {"image_embeds": tensor}, **more}


async def ask(parts, *content, salt=None, stage_options=b"{}", client=""):
    """Send a body as clients do; this stands in for vLLM: its hook resolves every reference in the body's order."""
    body = {"messages": [{"role": "user", "content": list(content)}], "cache_salt": salt}
    with open_scope() as scope:
        found = extract(json.dumps(body).encode(), MediaConfig(), references=scope.references)
        scope.client = client
        scope.extracted = ExtractedMedia(tuple(map(scope.owned, found.refs)))
        items = tuple([await parts.gateway.by_uuid(scope.references.text(n)) for n in range(len(scope.extracted.refs))])
        token_ids = [1] + [token for _ in items for token in (2, PLACEHOLDER_TOKEN)]
        tokens = await parts.answer(MediaPrompt(token_ids, items, stage_options))
        return tokens, scope.timeline.cache


@pytest.mark.parametrize("stage", ["auto", "decoded", "url"])
async def test_uuid_without_content_gives_the_output_of_its_content(arena, preparers, worker, seen, stage):
    async with Parts(arena, preparers, [worker], config=GatewayConfig(stage=stage, **FAST)) as parts:
        tokens, _ = await ask(parts, image(FIRST, "u"))
        assert (await ask(parts, image(uuid="u")))[0] == tokens
    (first, first_bytes), (second, second_bytes) = seen
    assert type(first) is type(second) is (ExpandedPrompt if stage == "auto" else UnexpandedPrompt)
    assert first.media[0].mm_hash == second.media[0].mm_hash
    assert first_bytes == second_bytes


async def test_uuid_without_content_hits_the_feature_cache(arena, preparers, worker, seen):
    async with Parts(arena, preparers, [worker]) as parts:
        assert (await ask(parts, image(FIRST, "u")))[1] == "miss"
        assert (await ask(parts, image(uuid="u")))[1] == "hit"
        assert (await ask(parts, image(uuid="u"), stage_options=b'{"scale":2}'))[1] == "miss"
    assert preparers.stats().num_done == 2


@pytest.mark.parametrize(
    ("salt", "part"),
    [
        (None, image(uuid="v")),
        ("tenant", image(uuid="u")),
        (None, {"type": "video_url", "video_url": None, "uuid": "u"}),
    ],
    ids=["another", "another tenant", "another modality"],
)
async def test_unknown_uuid_is_rejected_by_name(arena, preparers, worker, seen, salt, part):
    async with Parts(arena, preparers, [worker]) as parts:
        await ask(parts, image(FIRST, "u"))
        with pytest.raises(UnknownMediaUuid) as raised:
            await ask(parts, part, salt=salt)
        assert raised.value.param == f"messages[0].content[0].{part['type']}"
    assert len(seen) == 1


@pytest.mark.parametrize("stage", ["auto", "decoded", "url"])
async def test_uuid_of_one_client_is_not_rebound_by_another(arena, preparers, worker, seen, stage):
    """Both use one API key and no salt."""
    async with Parts(arena, preparers, [worker], config=GatewayConfig(stage=stage, **FAST)) as parts:
        await ask(parts, image(FIRST, "u"))
        with pytest.raises(UuidConflict) as raised:
            await ask(parts, image(SECOND, "u"))
        assert raised.value.param == "messages[0].content[0].image_url"
        for part in (image(uuid="u"), image(FIRST, "u"), image(FIRST), image(SECOND)):
            await ask(parts, part)
        await eventually(lambda: parts.num_held == 0)
    *firsts, second = [prompt.media[0].mm_hash for prompt, _ in seen]
    assert len(set(firsts)) == 1
    assert second not in firsts


async def test_clients_with_different_keys_have_their_own_uuids(arena, preparers, worker, seen):
    async with Parts(arena, preparers, [worker]) as parts:
        await ask(parts, image(FIRST, "u"), client="a")
        await ask(parts, image(SECOND, "u"), client="b")
        for client in "ab":
            await ask(parts, image(uuid="u"), client=client)
        with pytest.raises(UnknownMediaUuid):
            await ask(parts, image(uuid="u"))
    sizes = [prompt.features[0].size.width for prompt, _ in seen]
    assert sizes == [60, 90, 60, 90]


async def test_uuid_does_not_affect_keys(arena, preparers, worker, seen):
    async with Parts(arena, preparers, [worker]) as parts:
        for part in (image(FIRST, "u"), image(FIRST, "v"), image(FIRST)):
            await ask(parts, part)
    assert len({prompt.media[0].mm_hash for prompt, _ in seen}) == 1
    assert preparers.stats().num_done == 1


async def test_uuid_with_two_contents_in_a_request_is_a_conflict(arena, preparers, worker, seen):
    async with Parts(arena, preparers, [worker]) as parts:
        with pytest.raises(UuidConflict):
            await ask(parts, image(FIRST, "u"), image(SECOND, "u"))
        await ask(parts, image(FIRST, "v"), image(FIRST, "v"))
        await eventually(lambda: parts.num_held == 0)
    assert len(seen) == 1


async def test_uuids_are_scoped_to_the_tenant(arena, preparers, worker, seen):
    async with Parts(arena, preparers, [worker]) as parts:
        await ask(parts, image(FIRST, "u"), salt="a")
        await ask(parts, image(SECOND, "u"), salt="b")
        for salt in ("a", "b"):
            await ask(parts, image(uuid="u"), salt=salt)
    sizes = [prompt.features[0].size.width for prompt, _ in seen]
    assert sizes == [60, 90, 60, 90]


async def test_uuid_of_evicted_content_is_rejected(arena, preparers, worker, seen):
    async with Parts(arena, preparers, [worker]) as parts:
        await ask(parts, image(FIRST, "u"))
        await eventually(lambda: parts.num_held == 0)
        arena.clear()
        with pytest.raises(UnknownMediaUuid):
            await ask(parts, image(uuid="u"))
        await ask(parts, image(FIRST, "u"))
        await ask(parts, image(uuid="u"))
    assert len(seen) == 3


async def test_unusable_content_gets_no_alias(arena, preparers, worker, seen):
    async with Parts(arena, preparers, [worker]) as parts:
        with pytest.raises(InvalidImage):
            await ask(parts, image(b"no image", "u"))
        with pytest.raises(UnknownMediaUuid):
            await ask(parts, image(uuid="u"))


async def test_item_options_are_stored_with_its_alias(arena, preparers, worker, seen):
    async with Parts(arena, preparers, [worker], config=GatewayConfig(stage="url", **FAST)) as parts:
        await ask(parts, image(FIRST, "u", max_pixels=1000))
        await ask(parts, image(uuid="u"))
        await ask(parts, image(uuid="u", max_pixels=500))
    options = [msgspec.json.decode(prompt.options) for prompt, _ in seen]
    assert options == [{"max_pixels": 1000}, {"max_pixels": 1000}, {"max_pixels": 500}]


@pytest.mark.parametrize("stage", ["auto", "features", "decoded", "url"])
async def test_embeddings_are_forwarded_unchanged_in_every_stage(arena, preparers, worker, seen, stage):
    async with Parts(arena, preparers, [worker], config=GatewayConfig(stage=stage, **FAST)) as parts:
        await ask(parts, embeds(uuid="e"))
        await ask(parts, {"type": "image_embeds", "image_embeds": None, "uuid": "e"})
        await ask(parts, embeds(seed=1))
    for prompt, _ in seen:
        assert (type(prompt), prompt.stage, prompt.media[0].media_type) == (UnexpandedPrompt, "url", EMBEDS_TYPE)
    documents = [decode_embeds(datas[0][0]) for _, datas in seen]
    assert documents[0] == documents[1] != documents[2]
    hashes = [prompt.media[0].mm_hash for prompt, _ in seen]
    assert hashes[0] == hashes[1] != hashes[2]
    assert preparers.stats().num_done == 0


async def test_embeddings_may_be_combined_with_another_modality(arena, preparers, worker, seen):
    audio = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64," + base64.b64encode(wav()).decode()}}
    async with Parts(arena, preparers, [worker]) as parts:
        await ask(parts, embeds(), audio)
    ((prompt, datas),) = seen
    assert [item.modality for item in prompt.media] == ["image", "audio"]
    assert datas[1] == [wav()]


async def test_embeddings_and_images_are_not_interchangeable(arena, preparers, worker, seen):
    """A document of embeddings sent as an image is rejected, though the arena has it."""
    async with Parts(arena, preparers, [worker]) as parts:
        await ask(parts, embeds(uuid="u"))
        ((_, ((document,),)),) = seen
        with arena.lookup(content_hash(document), "encoded") as pin:
            assert pin.value.media_type == EMBEDS_TYPE
        with pytest.raises(InvalidImage):
            await ask(parts, image(document))
        with pytest.raises(UnknownMediaUuid):
            await ask(parts, image(uuid="u"))


def wav() -> bytes:
    header = b"RIFF" + (36 + 3200).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little")
    form = b"\1\0\1\0" + (16000).to_bytes(4, "little") + (32000).to_bytes(4, "little") + b"\2\0\x10\0"
    return header + form + b"data" + (3200).to_bytes(4, "little") + bytes(3200)
