import io
import json
import threading
import time
from base64 import b64encode
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medialane.gateway import GatewayConfig, References, RequestScope
from medialane.gateway.intake import ExtractedMedia
from medialane.gateway.intake import extract as extract_with
from medialane.media import MAX_URL_BYTES, MediaConfig
from medialane.types.errors import (
    BodyTooLarge,
    EmptyMedia,
    InvalidBase64,
    InvalidBody,
    InvalidDataUrl,
    InvalidEmbeds,
    InvalidMediaUrl,
    InvalidRequest,
    MedialaneError,
    MediaTooLarge,
    MediaUrlForbidden,
    TooManyMediaItems,
    UnsupportedMediaType,
)
from medialane.types.tensor import decode_embeds
from published import published_url

CONFIG = MediaConfig()
extract = partial(extract_with, references=References("medialane:"))
PIXELS = bytes(range(256)) * 20
PNG = "data:image/png;base64," + b64encode(PIXELS).decode()
SMALL = "data:image/gif;base64," + b64encode(b"GIF89a").decode()
HTTP = "https://example.com/a b.png?x=%20"


def chat(*parts, **fields) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **fields}


def image(url) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def extracted(document: object, config: MediaConfig = CONFIG):
    return extract(json.dumps(document).encode(), config)


def test_payload_becomes_a_reference_and_its_bytes():
    found = extracted(chat({"type": "text", "text": "what?"}, image(PNG), cache_salt="tenant"))
    assert json.loads(found.body) == chat({"type": "text", "text": "what?"}, image("medialane:0"), cache_salt="tenant")
    assert found.cache_salt == "tenant"
    (ref,) = found.refs
    assert (ref.modality, ref.data, ref.media_type) == ("image", PIXELS, "image/png")
    assert ref.param == "messages[0].content[1].image_url"
    assert ref.salt == "tenant"


def test_url_is_kept_for_fetching():
    (ref,) = extracted(chat(image(HTTP))).refs
    assert (ref.url, ref.data, ref.salt) == (HTTP, None, "")


@pytest.mark.parametrize("padding", [0, 150_000])
def test_published_image_is_left_to_the_store(padding):
    url = published_url(json.dumps("x" * padding).encode(), 7, 5)
    found = extracted(chat(image(url)), MediaConfig(allow_rdma=True))
    (ref,) = found.refs
    assert (ref.modality, ref.url, ref.data) == ("image", url, None)
    assert json.loads(found.body) == chat(image("medialane:0"))


@pytest.mark.parametrize(
    ("part", "allowed", "error"),
    [
        ("image_url", False, MediaUrlForbidden),
        ("video_url", True, UnsupportedMediaType),
        ("audio_url", True, UnsupportedMediaType),
    ],
)
def test_published_media_are_refused_unless_they_are_images_and_the_operator_allows_it(part, allowed, error):
    body = chat({"type": part, part: {"url": published_url(b"{}", 7, 5)}})
    with pytest.raises(error) as raised:
        extracted(body, MediaConfig(allow_rdma=allowed))
    assert raised.value.param == f"messages[0].content[0].{part}"


def test_large_description_of_a_published_image_is_refused():
    url = published_url(json.dumps("x" * MAX_URL_BYTES).encode(), 7, 5)
    with pytest.raises(MediaTooLarge):
        extracted(chat(image(url)), MediaConfig(allow_rdma=True))


def test_references_are_numbered_in_prompt_order():
    found = extracted(chat(image(PNG), image(HTTP), {"type": "text", "text": PNG}, image(SMALL)))
    assert [ref.url or ref.data for ref in found.refs] == [PIXELS, HTTP, b"GIF89a"]
    urls = [
        part["image_url"]["url"] for part in json.loads(found.body)["messages"][0]["content"] if "image_url" in part
    ]
    assert urls == ["medialane:0", "medialane:1", "medialane:2"]


def test_reference_numbers_do_not_depend_on_field_order():
    part = {"video_url": HTTP, "image_url": PNG}
    found = extracted(chat(part))
    assert json.loads(found.body)["messages"][0]["content"] == [
        {"video_url": "medialane:1", "image_url": "medialane:0"}
    ]
    assert [ref.modality for ref in found.refs] == ["image", "video"]


@pytest.mark.parametrize(
    ("part", "modality", "name"),
    [
        ({"type": "image_url", "image_url": PNG}, "image", "image_url"),
        ({"type": "input_image", "detail": "auto", "image_url": PNG}, "image", "image_url"),
        ({"type": "video_url", "video_url": {"url": PNG}}, "video", "video_url"),
        ({"type": "audio_url", "audio_url": {"url": PNG}}, "audio", "audio_url"),
        ({"image_url": PNG, "uuid": "u"}, "image", "image_url"),
    ],
    ids=str,
)
def test_forms_of_a_media_part(part, modality, name):
    (ref,) = extracted(chat(part)).refs
    assert (ref.modality, ref.data, ref.param) == (modality, PIXELS, f"messages[0].content[0].{name}")


def test_input_of_a_response():
    body = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": SMALL}]}]}
    found = extracted(body)
    assert found.refs[0].param == "input[0].content[0].image_url"
    assert json.loads(found.body)["input"][0]["content"][0]["image_url"] == "medialane:0"


@pytest.mark.parametrize("data", [PIXELS, b"RIFF"])
def test_input_audio(data):
    part = {"type": "input_audio", "input_audio": {"data": b64encode(data).decode(), "format": "wav"}}
    found = extracted(chat(part))
    (ref,) = found.refs
    assert (ref.modality, ref.data, ref.media_type) == ("audio", data, "audio/wav")
    assert ref.param == "messages[0].content[0].input_audio"
    (lifted_part,) = json.loads(found.body)["messages"][0]["content"]
    assert lifted_part["input_audio"] == {"data": "medialane:0", "format": "wav"}


def anthropic(**source) -> dict:
    return {"type": "image", "source": source}


def test_anthropic_images_are_extracted_at_every_position():
    base64 = b64encode(PIXELS).decode()
    inline = anthropic(type="base64", media_type="image/webp", data=base64)
    linked = anthropic(type="url", url=HTTP, data="ignored")
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}, inline]}
    found = extracted(chat(linked, result, anthropic(data=base64)))
    assert [ref.url or ref.data for ref in found.refs] == [HTTP, PIXELS, PIXELS]
    assert [ref.media_type for ref in found.refs] == [None, "image/webp", "image/jpeg"]
    assert [ref.param for ref in found.refs] == [
        "messages[0].content[0].source",
        "messages[0].content[1].content[1].source",
        "messages[0].content[2].source",
    ]
    parts = json.loads(found.body)["messages"][0]["content"]
    assert parts[0]["source"] == {"type": "url", "url": "medialane:0", "data": "ignored"}
    assert parts[1]["content"][1]["source"] == {"type": "base64", "media_type": "image/webp", "data": "medialane:1"}
    assert parts[2]["source"] == {"data": "medialane:2"}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "document", "source": "QUJD"},
        {"type": "image", "source": "x"},
        {"type": "image", "source": {"type": "url", "url": 3, "data": "QUJD"}},
        {"type": "image", "source": {"type": "base64", "data": ""}},
        {"type": "tool_result", "content": "text"},
        {"type": "tool_result", "content": [["x"], 1, "data:;base64,QUJD"]},
        {"type": "tool_use", "content": [{"type": "image", "source": {"data": "QUJD"}}]},
        {"type": ["image"], "source": {"data": "QUJD"}},
        {"type": "text", "text": "x", "image_embeds": "QUJD"},
        {"type": "image_embeds", "image_embeds": "QUJD", "audio_embeds": "QUJD"},
        {"type": "image_embeds", "image_embeds": None},
        {"type": "audio_embeds", "audio_embeds": ["QUJD"]},
        {"type": "prompt_embeds", "data": "QUJD"},
    ],
    ids=str,
)
def test_unknown_content_part_is_unchanged(part):
    body = json.dumps(chat(part)).encode()
    found = extract(body, CONFIG)
    assert (found.body, found.refs) == (body, ())


def test_content_parts_of_a_prompt_of_token_ids():
    parts = [
        {"type": "image_url", "url": PNG, "uuid": "u", "max_pixels": 4096},
        {"type": "text", "url": HTTP},
        {"type": "audio_url", "url": HTTP},
        {"type": "video_url", "uuid": "mine"},
        {"type": "video_url", "url": None},
        3,
    ]
    found = extracted({"token_ids": [1, 2], "content_parts": parts, "cache_salt": "s"})
    assert [(ref.modality, ref.param, ref.url, ref.alias and ref.alias.uuid, ref.salt) for ref in found.refs] == [
        ("image", "content_parts[0]", None, "u", "s"),
        ("audio", "content_parts[2]", HTTP, None, "s"),
        ("video", "content_parts[3]", None, "mine", "s"),
    ]
    assert found.refs[0].options == b'{"max_pixels":4096}'
    changed = json.loads(found.body)["content_parts"]
    assert [changed[0]["url"], changed[2]["url"], changed[3]["uuid"]] == ["medialane:0", "medialane:1", "medialane:2"]
    assert [changed[n] for n in (1, 4, 5)] == [parts[n] for n in (1, 4, 5)]


def test_result_of_a_tool_in_the_input_of_a_response():
    part = {"type": "input_image", "image_url": HTTP, "detail": "auto"}
    found = extracted({"input": [{"type": "function_call_output", "call_id": "c", "output": [part]}]})
    assert [(ref.url, ref.param) for ref in found.refs] == [(HTTP, "input[0].output[0].image_url")]
    assert json.loads(found.body)["input"][0]["output"][0]["image_url"] == "medialane:0"


MANY = [HTTP] * (CONFIG.max_items + 1)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"content_parts": [{"type": "image_url", "url": url} for url in MANY]}, "content_parts[16]"),
        ({"input": [{"output": [{"image_url": url} for url in MANY]}]}, "input[0].output[16].image_url"),
        ({"questions": {}, "images": MANY[1:], "videos": [HTTP]}, "videos[0]"),
        ({"questions": {}, "audio": MANY}, "audio[16]"),
    ],
)
def test_items_are_counted_wherever_one_prompt_has_them(body, param):
    with pytest.raises(TooManyMediaItems) as raised:
        extracted(body)
    assert raised.value.param == param


def test_batch_of_conversations():
    conversations = [[{"role": "user", "content": [image(PNG)]}], [{"content": "x"}, {"content": [image(HTTP)]}]]
    found = extracted({"messages": conversations})
    assert [ref.url or ref.data for ref in found.refs] == [PIXELS, HTTP]
    assert [ref.param for ref in found.refs] == [
        "messages[0][0].content[0].image_url",
        "messages[1][1].content[0].image_url",
    ]
    assert json.loads(found.body)["messages"][1][1]["content"] == [image("medialane:1")]


FRAMES = ",".join(b64encode(PIXELS + bytes([n])).decode() for n in range(3))


@pytest.mark.parametrize("frames", [FRAMES, "QUJD,QUJD", "QUJD"])
@pytest.mark.parametrize("header", ["data:video/jpeg;base64", "DATA:Video/JPEG;fps=1;Base64"])
@pytest.mark.parametrize("escape", [False, True])
def test_base64_frames_are_kept_unchanged(frames, header, escape):
    url = f"{header},{frames}"
    body = json.dumps(chat({"type": "video_url", "video_url": {"url": "URL"}}))
    found = extract(body.replace("URL", url.replace("/", "\\/") if escape else url).encode(), CONFIG)
    (ref,) = found.refs
    assert (ref.modality, ref.data, ref.media_type) == ("video", frames.encode(), "video/jpeg")
    assert json.loads(found.body) == chat({"type": "video_url", "video_url": {"url": "medialane:0"}})


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ("QUJD;QUJD", InvalidBase64),
        ("QUJD QUJD", InvalidBase64),
        ("_-" * 1000, InvalidBase64),
        ("é", InvalidBase64),
        ("", EmptyMedia),
        ("QUJD," * (5 << 20), MediaTooLarge),
    ],
    ids=lambda value: value[:9] if isinstance(value, str) else value.__name__,
)
def test_frames_that_are_not_base64_are_rejected(payload, error):
    with pytest.raises(error) as raised:
        extracted(chat({"type": "video_url", "video_url": f"data:video/jpeg;base64,{payload}"}))
    assert raised.value.param == "messages[0].content[0].video_url"


def test_video_data_url_with_image_type_is_base64():
    with pytest.raises(InvalidBase64):
        extracted(chat(image("data:video/jpeg;base64,QUJD,QUJD")))


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ('{"medialane":{"report":true},"messages":[]}', '{"messages":[]}'),
        ('{"messages":[],"medialane":{"report":true}}', '{"messages":[]}'),
        ('{"a":1 , "medialane" :\n{ "report" : true } , "messages":[]}', '{"a":1  , "messages":[]}'),
        ('{ "medialane" : {"report":true} }', "{}"),
        ('{"medialane":null,"a":"b"}', '{"a":"b"}'),
        ('{"a":",", "\\u006dedialane":{"report":true}}', '{"a":","}'),
        ('{"x":{"medialane":3},"medialane":{"report":true}}', '{"x":{"medialane":3}}'),
    ],
)
def test_medialane_fields_are_removed(body, left):
    found = extract(body.encode(), CONFIG)
    assert found.body.decode().replace(" ", "") == left.replace(" ", "")
    assert found.wants_report == ("true" in body)


def test_report_may_be_requested_with_media():
    body = {"medialane": {"report": True}, **chat(image(PNG)), "z": PNG}
    found = extracted(body)
    assert json.loads(found.body) == {**chat(image("medialane:0")), "z": PNG}
    assert found.wants_report
    assert found.refs[0].data == PIXELS


@pytest.mark.parametrize("own", [{}, {"report": False}])
def test_report_is_not_requested_by_default(own):
    found = extracted({"medialane": own, **chat(image(PNG))})
    assert not found.wants_report
    assert "medialane" not in json.loads(found.body)


@pytest.mark.parametrize(
    ("own", "param"),
    [
        ({"report": True, "rapport": 1}, "medialane.rapport"),
        ({"x" * 5000: 1}, "medialane." + "x" * 64),
        ({"report": 1}, "medialane.report"),
        ({"report": None}, "medialane.report"),
        ({"report": "true"}, "medialane.report"),
        (True, "medialane"),
        ([], "medialane"),
        ("report", "medialane"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unknown_medialane_field_is_rejected_by_name(own, param):
    with pytest.raises(InvalidRequest) as raised:
        extracted({"medialane": own, **chat(image(PNG))})
    assert raised.value.param == param


@pytest.mark.parametrize("value", [None, "", {"url": None}, {"url": ""}, {}, 7, ["x"], {"url": 3}, {"url": {"a": 1}}])
def test_part_without_a_url_is_unchanged(value):
    body = json.dumps(chat({"type": "image_url", "image_url": value})).encode()
    found = extract(body, CONFIG)
    assert (found.body, found.refs) == (body, ())


@pytest.mark.parametrize("value", [7, ["x"], {"url": 3}, {"url": {"a": 1}}, True])
def test_part_with_a_uuid_and_an_invalid_url_is_unchanged(value):
    body = json.dumps(chat({"type": "image_url", "image_url": value, "uuid": "known"})).encode()
    found = extract(body, CONFIG)
    assert (found.body, found.refs) == (body, ())


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("image_url", None, "image"),
        ("image_url", "", "image"),
        ("image_url", {"url": None}, "image"),
        ("image_url", {"url": ""}, "image"),
        ("image_url", {}, "image"),
        ("video_url", None, "video"),
        ("audio_url", None, "audio"),
        ("input_audio", {"data": "", "format": "wav"}, "audio"),
        ("image_embeds", None, "image_embeds"),
        ("audio_embeds", None, "audio_embeds"),
    ],
)
def test_item_with_only_a_uuid_gets_a_reference_as_its_uuid(name, value, kind):
    body = chat({"type": name, "uuid": "k\u00fcnown", name: value}, image(HTTP)) | {"cache_salt": "tenant"}
    found = extracted(body)
    ref = found.refs[0]
    assert (ref.is_alias, ref.alias.uuid, ref.alias.kind, ref.salt) == (True, "k\u00fcnown", kind, "tenant")
    assert (ref.modality, ref.is_embeds) == (kind.partition("_")[0], kind.endswith("_embeds"))
    assert ref.param == f"messages[0].content[0].{name}"
    assert (
        json.loads(found.body)["messages"]
        == chat({"type": name, "uuid": "medialane:0", name: value}, image("medialane:1"))["messages"]
    )


def test_uuid_with_content_is_an_alias_and_is_kept():
    part = {"type": "video_url", "video_url": {"url": HTTP, "fps": 2}, "uuid": "u"}
    found = extracted(chat(part))
    (ref,) = found.refs
    assert (ref.url, ref.alias.uuid, ref.alias.kind, ref.alias.io) == (HTTP, "u", "video", b'{"fps":2}')
    assert json.loads(found.body)["messages"][0]["content"][0]["uuid"] == "u"


NEEDS_SALT = GatewayConfig(require_salt=True)


@pytest.mark.parametrize("salt", [{}, {"cache_salt": None}, {"cache_salt": ""}, {"cache_salt": 7}])
@pytest.mark.parametrize("body", [chat(image(PNG)), {"content_parts": [{"type": "image_url", "uuid": "u"}]}])
def test_required_salt_is_named_if_it_is_missing(body, salt):
    with pytest.raises(InvalidRequest, match="needs a cache_salt") as raised:
        extract(json.dumps(body | salt).encode(), CONFIG, NEEDS_SALT)
    assert raised.value.param == "cache_salt"


@pytest.mark.parametrize("body", [chat(image(PNG), cache_salt="tenant"), chat({"type": "text", "text": "no media"})])
def test_salt_is_required_with_media_only(body):
    extract(json.dumps(body).encode(), CONFIG, NEEDS_SALT)


def test_alias_has_its_owner():
    body = json.dumps(chat(image(HTTP) | {"uuid": "u"}, image(HTTP))).encode()
    scope = RequestScope()
    scope.client = "the client"
    named, unnamed = map(scope.owned, extract(body, CONFIG).refs)
    assert (named.alias.owner, unnamed.alias) == ("the client", None)


@pytest.mark.parametrize("uuid", [None, 7, ["u"], {"u": 1}])
def test_non_string_uuid_is_ignored(uuid):
    found = extracted(chat({"type": "image_url", "image_url": {"url": PNG}, "uuid": uuid}))
    assert found.refs[0].alias is None
    body = json.dumps(chat({"type": "image_url", "image_url": None, "uuid": uuid})).encode()
    assert extract(body, CONFIG) == ExtractedMedia((), body, model="m")


def embeds(shape=(2, 3)) -> str:
    buffer = io.BytesIO()
    np.save(buffer, np.ones(shape, np.float32))
    return b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("uuid", [{}, {"uuid": None}, {"uuid": "u"}])
@pytest.mark.parametrize("kind", ["image", "audio", "video"])
@pytest.mark.parametrize(
    "value",
    [embeds(), {f"{n}": embeds((n, 600)) for n in (1, 2)} | {"grid": [1, 2, 3]}],
    ids=["one tensor", "named ones"],
)
def test_embeddings_are_extracted_and_their_reference_is_their_uuid(value, kind, uuid):
    name = f"{kind}_embeds"
    part = {"type": name, name: value} | uuid
    found = extracted(chat(image(PNG), part, image(HTTP)))
    first, ref, last = found.refs
    assert (first.data, last.url) == (PIXELS, HTTP)
    assert (ref.modality, ref.is_embeds, ref.param) == (kind, True, f"messages[0].content[1].{name}")
    assert (ref.alias and ref.alias.uuid) == uuid.get("uuid")
    fields = decode_embeds(ref.data).fields
    wanted = [(2, 3)] if isinstance(value, str) else [(1, 600), (2, 600), (3,)]
    assert [field.spec.shape for field in fields.values()] == wanted
    lifted_part = json.loads(found.body)["messages"][0]["content"][1]
    assert lifted_part == {"type": name, name: None, "uuid": "medialane:1"}


def test_invalid_embeddings_field_is_named():
    with pytest.raises(InvalidEmbeds) as raised:
        extracted(chat({"type": "image_embeds", "image_embeds": {"image_embeds": embeds(), "image_grid_thw": 3}}))
    assert raised.value.param == "messages[0].content[0].image_embeds.image_grid_thw"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b"[]",
        b'"text"',
        b'{"messages": 5}',
        b'{"messages": "hi"}',
        b'{"messages": {"a": [1]}}',
        b'{"messages": [1, null, "x", [2], {"content": 3}, {"content": {"a": 1}}, {"content": [[1], 2, "x", null]}]}',
        b'{"input": [[1, 2], [3]]}',
        b'{"messages": [[1, null], [[{"content": [{"image_url": "x"}]}]], [{"content": 3}], [{"content": [1]}]]}',
        b'{"messages": [{"content": [' + b'{"type":"tool_result","content":[' * 40,
        b'{"input": "embed me"}',
        b'{"temperature": NaN}',
        b'{"messages": "\xff"}',
        b'{"a": ' + b"[" * 90,
        b'{"messages": [{"content": [{"image_url": "data:;base64,' + b"A" * 5000,
        b";base64," + b"A" * 5000 + b'"',
    ],
    ids=lambda body: repr(body[:40]),
)
def test_body_of_unknown_structure_is_unchanged(body):
    assert extract(body, CONFIG).body == body
    assert extract(bytearray(body), CONFIG) == extract(body, CONFIG)


def test_escapes_are_decoded():
    escaped = PNG.replace("/", "\\/").replace("+", "\\u002b").replace("d", "\\u0064", 1)
    body = json.dumps(chat(image("URL"))).replace("URL", escaped).replace("image_url", "image\\u005furl").encode()
    found = extract(body, CONFIG)
    assert found.refs[0].data == PIXELS
    assert json.loads(found.body) == chat(image("medialane:0"))


def test_escapes_before_a_payload_do_not_shift_it():
    body = json.dumps(chat(image("URL"))).replace("URL", PNG.replace("image/png", "image\\/png")).encode()
    assert extract(body, CONFIG).refs[0].media_type == "image/png"


def test_payload_outside_media_is_unchanged():
    text = f"look at {PNG} and\n;base64,{'B' * 3000}"
    body = json.dumps(chat({"type": "text", "text": text}, image(HTTP)), ensure_ascii=False)
    found = extract(body.encode(), CONFIG)
    assert json.loads(found.body) == chat({"type": "text", "text": text}, image("medialane:0"))


def test_all_other_bytes_are_unchanged():
    body = (
        f'{{ "messages" :\n[ {{"content": [ {{"image_url" : {{"url":"{PNG}" , "fps":1.50}} }} ] }} ],"é": "\\u00e9" }}'
    )
    assert extract(body.encode(), CONFIG).body == body.replace(PNG, "medialane:0").encode()


def test_last_duplicate_key_wins():
    body = f'{{"messages":[{{"content":[{{"image_url":"{SMALL}","image_url":"{PNG}"}}]}}]}}'.encode()
    found = extract(body, CONFIG)
    assert json.loads(found.body)["messages"][0]["content"] == [{"image_url": "medialane:0"}]
    assert found.refs[0].data == PIXELS


@pytest.mark.parametrize(
    "part",
    [
        b'{"image_url":"https://a","uuid":"\xff"}',
        b'{"image_url":null,"uuid":"\xff"}',
        b'{"input_audio":{"data":"QUJD"},"uuid":"\xff"}',
        b'{"image_embeds":"QUJD","uuid":"\xff"}',
        b'{"image_embeds":{"\xff":"QUJD"}}',
    ],
)
def test_non_text_names_are_invalid_json_and_unchanged(part):
    body = b'{"messages":[{"content":[%b]}]}' % part
    found = extract(body, CONFIG)
    assert (found.body, found.refs) == (body, ())
    assert found.parse_error is not None


def test_non_text_embeddings_are_rejected_by_name():
    with pytest.raises(InvalidMediaUrl) as raised:
        extract(b'{"messages":[{"content":[{"image_embeds":"\\n\xff"}]}]}', CONFIG)
    assert raised.value.param == "messages[0].content[0].image_embeds"


@pytest.mark.parametrize("num_fields", [0, 9, 9000])
def test_embeddings_with_too_many_fields_are_rejected(num_fields):
    with pytest.raises(InvalidEmbeds) as raised:
        extracted(chat({"type": "image_embeds", "image_embeds": {f"f{n}": "" for n in range(num_fields)}}))
    assert raised.value.param == "messages[0].content[0].image_embeds"


@pytest.mark.parametrize("salt", [None, 5, ["x"], {}])
def test_non_string_salt_is_left_to_the_application(salt):
    found = extracted(chat(image(PNG), cache_salt=salt))
    assert found.refs[0].salt == ""


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("medialane:0", InvalidMediaUrl),
        ("MediaLane:1", InvalidMediaUrl),
        ("data:image/png;base64,", EmptyMedia),
        ("data:image/png,xyz", InvalidDataUrl),
        ("data:image/png;base64", InvalidDataUrl),
        ("data:image/png;base64;x=1,AAAA", InvalidDataUrl),
        ("data:,;base64," + "A" * 4096, InvalidDataUrl),
        ("data:image/png;base64,????", InvalidBase64),
        ("data:image/png;base64,AAA", InvalidBase64),
        ("data:image/png;base64,AA AA", InvalidBase64),
        ("data:image/png;base64," + "_-" * 2000, InvalidBase64),
        ("data:image/png;base64," + "é" * 2000, InvalidBase64),
        ("data:image/png;base64," + "A" * 2000 + ",AA", InvalidBase64),
        ("data:" + "x" * 5_000_000 + ";base64,AAAA", InvalidDataUrl),
        ("data:image/png;base64," + "A" * (21 << 20), MediaTooLarge),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else value.__name__,
)
def test_error_names_the_field(url, error):
    with pytest.raises(error) as raised:
        extracted({"messages": [{"content": "x"}, {"content": [{"type": "text", "text": "x"}, image(url)]}]})
    assert raised.value.param == "messages[1].content[1].image_url"
    assert len(raised.value.message) < 200


def encoded(text: str, encoding: str) -> bytes:
    return text.encode(encoding, "surrogatepass")


ENCODINGS = ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("escaped", [False, True])
def test_media_are_found_in_every_encoding_python_parses(encoding, escaped):
    document = chat({"type": "text", "text": "\u4e2d\ud800 \U0001f600"}, image(PNG), image(HTTP))
    found = extract(encoded(json.dumps(document, ensure_ascii=escaped), encoding), CONFIG)
    assert [ref.data or ref.url for ref in found.refs] == [PIXELS, HTTP]
    wanted = chat({"type": "text", "text": "\u4e2d\ud800 \U0001f600"}, image("medialane:0"), image("medialane:1"))
    assert json.loads(found.body) == wanted


def test_encoded_body_longer_than_a_chunk_is_converted_completely():
    document = chat({"type": "text", "text": "\U0001f600" * 700_000}, image(PNG))
    found = extract(encoded(json.dumps(document, ensure_ascii=False), "utf-16"), CONFIG)
    assert json.loads(found.body)["messages"][0]["content"][0] == document["messages"][0]["content"][0]
    assert found.refs[0].data == PIXELS


def test_body_with_encoding_errors_is_left_to_the_application():
    body = encoded("{}", "utf-16") + b"\xd8"
    assert extract(body, CONFIG).body == body


LENIENT = [
    ("temperature", "NaN"),
    ("temperature", "-Infinity"),
    ("top_p", "Infinity"),
    ("user", '"\\ud800 NaN"'),
    ("user", '"\\uDFFFx\\ud83d"'),
    ("user", '"\ud800"'),
]


@pytest.mark.parametrize(("name", "value"), LENIENT)
@pytest.mark.parametrize("before", [True, False])
def test_non_standard_json_of_python_is_accepted_with_media(name, value, before):
    text = json.dumps(chat(image(PNG), {"type": "text", "text": PNG}))
    text = f'{{"{name}": {value}, {text[1:]}' if before else f'{text[:-1]}, "{name}": {value}}}'
    body = encoded(text, "utf-8")
    found = extract(body, CONFIG)
    assert found.refs[0].data == PIXELS
    assert found.body == body.replace(PNG.encode(), b"medialane:0", 1)


def test_text_with_a_lone_surrogate_is_unchanged():
    body = json.dumps(chat({"type": "text", "text": "\ud83d NaN \ude00"}, image(SMALL))).encode()
    assert extract(body, CONFIG).body == body.replace(SMALL.encode(), b"medialane:0")


@pytest.mark.parametrize("number", [0xD800, 0xDBFF, 0xDC00, 0xDFFF], ids=hex)
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize(
    ("document", "param"),
    [
        (chat(image(PNG), image("https://a/@@")), "messages[0].content[1].image_url"),
        (chat(image(PNG) | {"uuid": "a@@"}), "messages[0].content[0].image_url"),
        (chat({"type": "image_url", "image_url": None, "uuid": "@@"}), "messages[0].content[0].image_url"),
        (chat(image(PNG), cache_salt="@@a"), "cache_salt"),
    ],
    ids=["url", "uuid", "uuid alone", "salt"],
)
def test_lone_surrogate_in_a_media_field_is_named(number, ascii_only, document, param):
    """Two uuids or salts that differ only in that must stay distinct."""
    text = json.dumps(document).replace("@@", f"\\u{number:04x}" if ascii_only else chr(number))
    with pytest.raises(InvalidRequest) as raised:
        extract(encoded(text, "utf-8"), CONFIG)
    assert raised.value.param == param
    assert "surrogate" in raised.value.message


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_non_numeric_option_is_named(value):
    part = b'{"type": "video_url", "video_url": {"url": "https://a/v", "fps": %b}}' % value.encode()
    with pytest.raises(InvalidRequest) as raised:
        extract(b'{"messages": [{"content": [%b]}]}' % part, CONFIG)
    assert raised.value.param.startswith("messages[0].content[0].video_url")


def test_too_many_items_are_rejected_before_decoding():
    with pytest.raises(TooManyMediaItems) as raised:
        extracted(chat(*[image("data:nonsense")] * 17))
    assert raised.value.param == "messages[0].content[16].image_url"
    assert "17" in raised.value.message


def test_item_limit_spans_all_messages():
    config = MediaConfig(max_items=2)
    message = {"role": "user", "content": [image(HTTP)]}
    assert len(extracted({"messages": [message] * 2}, config).refs) == 2
    with pytest.raises(TooManyMediaItems):
        extracted({"messages": [message] * 3}, config)


def content(*parts) -> dict:
    return {"content": list(parts)}


INPUTS = {
    "queries[0].content[1].image_url": {"queries": [content({"type": "text", "text": "a"}, image(PNG))]},
    "query.content[0].image_url": {"query": content(image(PNG)), "documents": ["a"]},
    "documents[1].content[0].image_url": {"query": "a", "documents": ["a", content(image(PNG))]},
    "items[0].content[0].image_url": {"queries": "a", "items": [content(image(PNG))]},
    "data_1.content[0].image_url": {"data_1": content(image(PNG)), "data_2": "a"},
    "data_2[0].content[0].image_url": {"data_1": "a", "data_2": [content(image(PNG))]},
    "text_1.content[0].image_url": {"text_1": content(image(PNG)), "text_2": "a"},
    "text_2[0].content[0].image_url": {"text_1": "a", "text_2": [content(image(PNG))]},
    "inputs[0].content[0].image_url": {"inputs": [content(image(PNG))]},
    "images[1]": {"images": ["", PNG]},
    "input[0].content[0].image_url": {"input": [{"role": "user", **content(image(PNG))}]},
    "input[1][0].content[0].image_url": {"input": [[], [{"role": "user", **content(image(PNG))}]]},
}


@pytest.mark.parametrize(("param", "body"), INPUTS.items(), ids=INPUTS)
def test_media_of_inputs_to_be_encoded_or_scored_become_references(param, body):
    found = extracted(body)
    assert [(ref.param, ref.data) for ref in found.refs] == [(param, PIXELS)]
    assert json.loads(found.body) == json.loads(json.dumps(body).replace(PNG, "medialane:0"))


BATCHES = {
    "documents": [content(image(HTTP))] * 3,
    "messages": [[{"role": "user", **content(image(HTTP))}]] * 3,
    "images": [HTTP] * 3,
}


@pytest.mark.parametrize("name", BATCHES)
def test_item_limit_is_that_of_each_prompt_with_another_for_all(name):
    body = {name: BATCHES[name]}
    assert len(extracted(body, MediaConfig(max_items=1, max_batch_items=3)).refs) == 3
    with pytest.raises(TooManyMediaItems, match="3 media items, more than 2") as raised:
        extracted(body, MediaConfig(max_items=1, max_batch_items=2))
    assert raised.value.param.startswith(f"{name}[2]")


def test_item_limit_of_a_document_is_that_of_a_prompt():
    with pytest.raises(TooManyMediaItems) as raised:
        extracted({"query": "a", "documents": ["a", content(image(HTTP), image(HTTP))]}, MediaConfig(max_items=1))
    assert raised.value.param == "documents[1].content[1].image_url"


def test_media_are_extracted_beyond_the_string_scan_limit():
    filler = [{"type": "text", "text": f";base64,{n}"} for n in range(300)]
    found = extracted(chat(*filler, image(PNG)))
    assert found.refs[0].data == PIXELS
    assert json.loads(found.body) == chat(*filler, image("medialane:0"))


NO_MEDIA = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function", "function": {"parameters": nested(20)}}] * 3000},
        {"logit_bias": {str(n): 1 for n in range(30_000)}},
        {"messages": [{"role": "user", "content": "x"}] * 2001},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2000}]},
        {"messages": [1] * 2001},
        {"messages": [{"content": [{"type": "tool_result", "content": [{"type": "text"}] * 1999}]}]},
        {"input": [{"role": "user", "content": "x"}] * 2001},
        {"tools": nested(101)},
        {"tools": [[]] * 20_001},
        {"prompt": [1, "a"] * 600},
        {"prompt": [-1] * 1001},
        {"tokens": [1.5] * 1001},
        {"token_ids": [[1], 2] * 600},
        {"prompt": [[[1] * 20_001]]},
        {"prompt": [7] * ((1 << 17) + 1)},
        {"stop": [7] * 20_001},
    ],
    ids=lambda body: str(body)[:40],
)
def test_body_too_expensive_to_parse_is_rejected_before_parsing(body):
    with pytest.raises(InvalidBody):
        extracted({**NO_MEDIA, **body})


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "tools", [[TOOL] * 257, [{"type": "namespace", "tools": [TOOL] * 256}], [TOOL, {"tools": [1] * 256}], [[]] * 257]
)
def test_body_with_too_many_tools_is_rejected(tools):
    with pytest.raises(InvalidBody, match="more than 256 tools") as raised:
        extracted({**NO_MEDIA, "tools": tools})
    assert raised.value.param == "tools"


@pytest.mark.parametrize(
    "tools",
    [[TOOL] * 256, [{"type": "namespace", "tools": [TOOL] * 255}], {"a": [1] * 300}, "x" * 300, [{"tools": {}}]],
)
def test_body_with_as_many_tools_as_permitted_is_accepted(tools):
    body = json.dumps({**NO_MEDIA, "tools": tools}).encode()
    assert extract(body, CONFIG).body == body


CONVERSATION = [{"role": "user", "content": "x"}]
FEW_PROMPTS = GatewayConfig(max_prompts=256)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("prompt", {"prompt": ["x"] * 257}),
        ("prompt", {"prompt": [[1, 2]] * 257}),
        ("prompt_embeds", {"prompt_embeds": ["x"] * 257}),
        ("messages", {"messages": [CONVERSATION] * 257}),
        ("items", {"query": "x", "items": ["x"] * 257}),
        ("items", {"query": [1], "items": [[1]] * 257}),
        ("documents", {"query": "x", "documents": ["x"] * 257}),
        ("data_1", {"data_1": ["x"] * 257, "data_2": "x"}),
        ("inputs", {"inputs": [{"content": []}] * 257}),
        ("input", {"input": ["x"] * 257}),
        ("input", {"input": [[1, 2]] * 257}),
        ("input", {"input": [CONVERSATION] * 257}),
        ("texts", {"texts": ["x"] * 257}),
        ("images", {"images": ["x"] * 257}),
    ],
)
def test_body_with_too_many_prompts_is_rejected(name, body):
    with pytest.raises(InvalidBody, match="more than 256 prompts") as raised:
        extract(json.dumps(body, indent=1).encode(), CONFIG, FEW_PROMPTS)
    assert raised.value.param == name


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["x"] * 256},
        {"prompt": [1] * 300},
        {"prompt": [[1] * 300]},
        {"messages": [CONVERSATION] * 256},
        {"messages": CONVERSATION * 300},
        {"messages": CONVERSATION, "items": ["x"] * 300},
        {"query": "x", "items": {"a": ["x"] * 300}},
        {"messages": CONVERSATION, "documents": [{"text": "x"}] * 300},
        {"input": CONVERSATION * 300},
        {"input": list(range(100_000))},
        {"input": [list(range(50_000))] * 2},
        {"input": ["x"] * 256},
    ],
)
def test_body_with_as_many_prompts_as_permitted_is_accepted(body):
    sent = json.dumps(body).encode()
    assert extract(sent, CONFIG, FEW_PROMPTS).body == sent


@pytest.mark.parametrize("body", [b"[" * 101, b'{"a":' * 101, b"[1," * 30_000, b'{"a":1' + b"1" * 4300 + b"}"])
def test_limits_apply_to_invalid_json(body):
    with pytest.raises(InvalidBody):
        extract(body, CONFIG)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "[[[{{{,,,:" * 10_000}]},
        {"messages": [{"role": "user", "content": "x"}] * 2000},
        {"tools": nested(99)},
        {"prompt": [7] * (1 << 17)},
        {"prompt": [[7] * 4000] * 30},
        {"prompt": ["a text"] * 1024},
        {"prompt": {"id": "p", "variables": {f"v{n}": "x" for n in range(2000)}}},
        {"tokens": list(range(100_000))},
        {"token_ids": list(range(100_000))},
        {"response_format": {"properties": {f"p{n}": {"type": "string"} for n in range(9000)}}},
    ],
    ids=lambda body: str(body)[:40],
)
def test_realistic_body_is_accepted(body):
    body = json.dumps({**NO_MEDIA, **body}).encode()
    assert extract(body, CONFIG).body == body


def test_limits_are_configurable():
    body = json.dumps({**NO_MEDIA, "tools": nested(150), "logit_bias": {str(n): 1 for n in range(30_000)}}).encode()
    assert extract(body, CONFIG, GatewayConfig(max_body_depth=200, max_body_values=50_000)).body == body
    with pytest.raises(InvalidBody):
        extract(json.dumps(NO_MEDIA).encode(), CONFIG, GatewayConfig(max_body_depth=2))


@pytest.mark.parametrize("text", ["x" * (4 << 20), PNG * 700, "\\" * (2 << 20)])
def test_text_has_its_own_limit(text):
    with pytest.raises(BodyTooLarge) as raised:
        extracted(chat({"type": "text", "text": text}, image(SMALL)))
    assert "media" in raised.value.message


def test_media_do_not_count_towards_the_text_limit():
    url = "data:image/png;base64," + b64encode(bytes(5 << 20)).decode()
    for body in (json.dumps(chat(image(url))), json.dumps(chat(image(url))).replace("/", "\\/")):
        (ref,) = extract(body.encode(), CONFIG).refs
        assert len(ref.data) == 5 << 20


def test_counting_a_large_body_releases_the_gil():
    """It runs in a thread and must let other threads run."""
    text = b"[" * (32 << 20)
    with pytest.raises(InvalidBody):
        extract(text, CONFIG)
    pauses, done = [], threading.Event()

    def ticking():
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.0005)  # time: longer only while the GIL is held
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    thread = threading.Thread(target=ticking)
    thread.start()
    started = time.thread_time()
    with pytest.raises(InvalidBody):
        extract(text, CONFIG)
    took = time.thread_time() - started
    done.set()
    thread.join()
    assert took > 0.01
    assert len(pauses) > 3  # one or two, were the lock held


def test_body_may_be_a_part_of_a_buffer():
    body = json.dumps(chat(image(PNG), medialane={"report": True})).encode()
    found = extract(bytearray(body + body), CONFIG, size=len(body))
    assert found == extract(body, CONFIG)


@pytest.mark.parametrize("body", [b"{}", json.dumps(chat(image(PNG), image(HTTP))).encode(), b'{"a', b"\xef\xbb\xbf{}"])
def test_no_view_of_the_buffer_is_kept(body):
    buffer = bytearray(body)
    found = extract(buffer, CONFIG)
    buffer.append(0)  # BufferError while there is a view of it
    assert found.body is not buffer


URLS = st.one_of(
    st.binary(min_size=1, max_size=2000).map(lambda data: "data:image/png;base64," + b64encode(data).decode()),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
        lambda url: not url.lower().startswith(("data:", "medialane:"))
    ),
)
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from([PNG, ";base64,", f'"{PNG}\\', ";base64," + "C" * 2000, 'x";base64,' + "\\" * 1500, "\\"]),
    st.text('\\";base64,A/\n', max_size=40),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(-1e9, 1e9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
MEDIA_PARTS = st.builds(
    lambda name, url, plain, extra: {**extra, name: url if plain else {"detail": extra, "url": url}},
    st.sampled_from(["image_url", "video_url", "audio_url"]),
    URLS,
    st.booleans(),
    st.dictionaries(TEXTS, VALUES, max_size=2),
)
PARTS = MEDIA_PARTS | st.builds(lambda text: {"type": "text", "text": text}, TEXTS) | TEXTS
MESSAGES = st.builds(
    lambda content, extra: {**extra, "content": content},
    st.lists(PARTS, max_size=4) | TEXTS | st.none(),
    st.dictionaries(TEXTS, VALUES, max_size=2),
)
BODIES = st.builds(
    lambda messages, field, extra: {**extra, field: messages},
    st.lists(MESSAGES, max_size=3),
    st.sampled_from(["messages", "input"]),
    st.dictionaries(TEXTS, VALUES, max_size=3),
)


def replaced(document: dict, field: str) -> tuple[dict, list[str]]:
    """The document with every media URL replaced by the number of its turn, and the URLs."""
    urls: list[str] = []

    def reference(url: str) -> str:
        urls.append(url)
        return f"medialane:{len(urls) - 1}"

    document = json.loads(json.dumps(document))
    for message in document[field]:
        for part in message["content"] if isinstance(message["content"], list) else ():
            for name in ("image_url", "video_url", "audio_url") if isinstance(part, dict) else ():
                if isinstance(part.get(name), dict):
                    part[name]["url"] = reference(part[name]["url"])
                elif name in part:
                    part[name] = reference(part[name])
    return document, urls


@settings(max_examples=300, deadline=None)
@given(BODIES, st.booleans(), st.sampled_from([None, 1]), st.booleans())
def test_extracted_body_is_the_original_with_urls_replaced(document, ascii_only, indent, slashes):
    text = json.dumps(document, ensure_ascii=ascii_only, indent=indent)
    if slashes:
        text = text.replace("/", "\\/")
    expected, urls = replaced(document, "messages" if "messages" in document else "input")
    found = extract(text.encode(), MediaConfig(max_items=1000))
    assert json.loads(found.body) == expected
    for ref, url in zip(found.refs, urls, strict=True):
        assert ref.url == url or "data:image/png;base64," + b64encode(ref.data or b"").decode() == url


def in_utf8(body):
    """Return a body that Python's JSON parser takes for another encoding in UTF-8; as it is if it is invalid there."""
    if (encoding := json.detect_encoding(body)) == "utf-8":
        return body
    try:
        return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return body


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400) | st.text('{}[]":,\\ abimage_urlcontentmessages;base64', max_size=400).map(str.encode))
def test_any_bytes_are_extracted_forwarded_or_rejected(body):
    try:
        extracted = extract(body, CONFIG).body
    except MedialaneError:
        return
    try:
        wanted = json.loads(body)
    except (ValueError, RecursionError):
        assert extracted == in_utf8(body)  # the application answers as it does
    else:
        assert json.loads(extracted) == wanted or b"medialane:" in extracted
