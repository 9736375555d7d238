"""Processed items in a body: what the app gets instead, and what remains of them."""

import json
from base64 import b64encode

import pytest

from medialane.gateway import References
from medialane.gateway.intake import extract, placeholder_field
from medialane.media import MediaConfig
from medialane.types.errors import InvalidBase64, InvalidRequest, TooManyMediaItems

HASH, OTHER = "a" * 64, "b" * 64
TENSORS = bytes(range(256)) * 20
PLACE = {"offset": 1, "length": 2}
REFERENCES = References("medialane:xyz:")


def body(hashes, data, *, name="image", **fields):
    features = {"mm_hashes": {name: hashes}, "mm_placeholders": {name: [PLACE] * len(hashes)}}
    if data is not ...:
        features["kwargs_data"] = None if data is None else {name: data}
    return {"token_ids": [1, 2, 3], "features": features, "sampling_params": {}, **fields}


def extracted(document, **given):
    return extract(json.dumps(document).encode(), MediaConfig(), references=REFERENCES, **given)


def test_app_gets_references_instead_of_tensors():
    document = body([HASH, OTHER], [b64encode(TENSORS).decode(), f"medialane:feature/{HASH}"], cache_salt="salt")
    document["features"]["mm_metadata"] = {"image": ["x" * 5000, None]}
    found = extracted(document)
    left = json.loads(found.body)
    assert left["features"] == {
        "mm_hashes": {"image": [HASH, OTHER]},
        "mm_placeholders": {"image": [PLACE, PLACE]},
        "kwargs_data": {"image": ["medialane:xyz:0", "medialane:xyz:1"]},
    }
    assert {**left, "features": None} == {**document, "features": None}
    tensors, named = found.refs
    assert (tensors.data, tensors.content, named.data, named.content) == (TENSORS, HASH, None, HASH)
    assert all(ref.is_feature and ref.salt == "salt" for ref in found.refs)
    assert tensors.param == "features.kwargs_data.image[0]"
    assert placeholder_field(named) == "features.mm_placeholders.image[1]"


@pytest.mark.parametrize("data", [None, ..., [None]])
def test_item_without_data_is_named_by_its_hash(data):
    (ref,) = extracted(body([HASH], data)).refs
    assert (ref.data, ref.content) == (None, HASH)


def test_images_of_models_with_chunks_are_images():
    (ref,) = extracted(body([HASH], None, name="vision_chunk")).refs
    assert (ref.modality, ref.param) == ("image", "features.mm_hashes.vision_chunk[0]")


def test_text_has_no_features():
    for features in (None, {"mm_hashes": {}, "mm_placeholders": {}}):
        found = extracted({"token_ids": [1], "features": features})
        assert found.refs == ()
        assert json.loads(found.body)["features"] is None


def test_other_requests_may_have_a_member_of_that_name():
    document = {"messages": [], "features": ["anything"]}
    assert json.loads(extracted(document).body) == document


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ({"token_ids": [1], "features": {}}, "features"),
        ({"token_ids": [1], "features": "x"}, "features"),
        (body([HASH], ["x"], name="smell"), "features.mm_hashes.smell"),
        (body([HASH, OTHER], [None]), "features.kwargs_data"),
        (
            {"token_ids": [1], "features": {"mm_hashes": {}, "mm_placeholders": {"image": [PLACE]}}},
            "features.mm_placeholders",
        ),
        (body([HASH], [7]), "features.kwargs_data.image[0]"),
        (body([HASH], ["medialane:xyz:0"]), "features.kwargs_data.image[0]"),
        (body([""], None), "features.mm_hashes.image[0]"),
        (body(["a" * 257], ...), "features.mm_hashes.image[0]"),
    ],
)
def test_malformed_features_are_refused(document, param):
    with pytest.raises(InvalidRequest) as caught:
        extracted(document)
    assert caught.value.param == param


def test_base64_is_checked():
    with pytest.raises(InvalidBase64) as caught:
        extracted(body([HASH], ["***"]))
    assert caught.value.param == "features.kwargs_data.image[0]"


def test_items_are_counted():
    with pytest.raises(TooManyMediaItems):
        extracted(body([HASH] * 17, None))


def test_error_quotes_what_the_client_has_sent():
    found = extracted(body([HASH], [f"medialane:feature/{HASH}"]))
    assert REFERENCES.quoting_client(b'"medialane:xyz:0"', found.refs, is_error=True) == f'"{HASH}"'.encode()
