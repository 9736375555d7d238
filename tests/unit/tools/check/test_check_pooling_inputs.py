"""The matrix of other forms of requests for pooling models."""

import json

import pytest

from medialane.tools.check.kinds import KINDS, MODALITIES, POOLING_INPUTS


def names(**limits):
    return [case.name for case in POOLING_INPUTS.cases(limits)]


def test_the_kind_is_checked_and_its_limits_are_those_of_its_route():
    assert POOLING_INPUTS in KINDS
    assert POOLING_INPUTS.ask([{"type": "text", "text": "x"}]).path == POOLING_INPUTS.route


def test_names_are_unique():
    found = names(**dict.fromkeys(MODALITIES, 3))
    assert len(set(found)) == len(found)


def test_text_model_gets_no_media():
    assert not any(modality in name for name in names() for modality in MODALITIES)
    assert any(name.startswith("/score") for name in names())


@pytest.mark.parametrize(
    "case", [*POOLING_INPUTS.cases({"image": 2, "video": 1, "audio": 1})], ids=lambda case: case.name
)
def test_requests_are_json_with_media_in_them(case):
    request = case.make()
    document = json.dumps(request.body)
    assert case.name.partition(":")[0] == request.path
    assert ("data:" in document) == any(modality in case.name for modality in MODALITIES)
