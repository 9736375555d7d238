"""The matrix of pooling models fits their limits and endpoints."""

import json

import pytest

from medialane.tools.check.kinds import POOLING

KINDS = {kind.name: kind for kind in POOLING}


def parts_of(body):
    """The parts of the one message, or of the document that has media."""
    return body["messages"][0]["content"] if "messages" in body else body["documents"][0]["content"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("limits", [{}, {"image": 2, "video": 1}])
def test_requests_are_within_the_limits_unless_they_are_meant_to_be_refused(name, limits):
    kind = KINDS[name]
    cases = list(kind.cases(limits))
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        request = case.make()
        json.dumps(request.body)
        assert request.path == kind.route
        kinds = [part["type"].removesuffix("_url") for part in parts_of(request.body)]
        exceeded = [kind for kind in set(kinds) - {"text"} if kinds.count(kind) > limits.get(kind, 0)]
        assert bool(exceeded) == ("than the limit" in case.name or "has not" in case.name), case.name


def test_scores_are_asked_for_a_query_and_a_document_with_media():
    bodies = {name: KINDS[name].ask([{"type": "text", "text": "x"}]).body for name in ("score", "rerank")}
    assert bodies["score"].keys() == {"queries", "documents"}
    assert bodies["rerank"].keys() == {"query", "documents"}


def test_every_case_that_varies_another_comes_after_it():
    seen = set()
    for case in KINDS["pooling"].cases({"image": 2, "audio": 1}):
        assert not case.varies or case.varies in seen
        seen.add(case.name)
