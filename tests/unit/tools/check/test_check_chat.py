"""The matrix of chat completions fits the model's limits."""

import json

import pytest

from medialane.tools.check import Answer
from medialane.tools.check.case import CaseRequest
from medialane.tools.check.kinds import CHAT, KINDS
from medialane.tools.check.media import document, without_documents

EVERYTHING = {"image": 4, "video": 1, "audio": 2}


def num_items(case):
    messages = without_documents(case.make()).body["messages"]
    parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
    kinds = [part["type"].removesuffix("_url").removeprefix("input_") for part in parts if part["type"] != "text"]
    return {kind: kinds.count(kind) for kind in set(kinds)}


@pytest.mark.parametrize("limits", [{}, {"image": 1}, {"audio": 3}, {"image": 999, "video": 999}, EVERYTHING])
def test_requests_are_within_the_limits_unless_they_are_meant_to_be_refused(limits):
    cases = list(CHAT.cases(limits))
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        json.dumps(case.make().body)
        is_refused = "than the limit" in case.name or "has not" in case.name
        exceeded = [m for m, n in num_items(case).items() if n > limits.get(m, 0)]
        assert bool(exceeded) == is_refused, case.name


def test_every_case_that_varies_another_comes_after_it():
    seen = set()
    for case in CHAT.cases(EVERYTHING):
        assert not case.varies or case.varies in seen
        seen.add(case.name)


def test_small_matrix_has_each_modality_repeats_long_audio_and_a_refusal():
    names = [case.name for case in CHAT.cases(EVERYTHING) if case.is_essential]
    assert len(names) < len(list(CHAT.cases(EVERYTHING))) / 2
    assert {"one image", "one video", "one audio", "the same image twice", "audio, 34 s", "audio, 0.1 s"} <= set(names)
    assert "more of video than the limit" in names


def test_every_pair_of_modalities_is_sent_in_both_orders():
    names = {case.name for case in CHAT.cases(EVERYTHING)}
    assert {f"{a}, then {b}" for a in EVERYTHING for b in EVERYTHING if a != b} <= names


def test_plain_vllm_is_sent_the_pages_of_a_document():
    cases = {
        case.name: without_documents(case.make()).body["messages"][0]["content"] for case in CHAT.cases(EVERYTHING)
    }
    *pages, question = cases["document"]
    assert [part["type"] for part in pages] == ["text", "image_url"] * 2
    assert pages[0]["text"] == "Page 1 of document 1\nIt has (two) lines.\n"
    assert pages[1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert cases["document without its text"] == [pages[1], pages[3], question]
    assert [part.get("text") for part in cases["document, one page of two"]] == [
        "Page 2 of document 3\nIt has (two) lines.\n",
        None,
        question["text"],
    ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_requests_of_every_kind_without_documents_are_sent_as_they_are(kind):
    limits = EVERYTHING if kind.ask else {}
    for case in kind.cases(limits):
        if not case.name.startswith("document"):
            request = case.make()
            assert without_documents(request) == request, case.name


def test_plain_vllm_is_sent_the_pages_of_a_document_wherever_it_stands():
    words, message = {"type": "text", "text": "a"}, {"role": "user", "content": [document(1, 1)]}
    for body in ({"messages": [[message], [message]]}, {"input": [message]}, {"documents": [message, "a"]}):
        sent = without_documents(CaseRequest("/", body)).body
        assert str(sent).count("data:image/png") == str(body).count("file_data")
    others = {"messages": [{"role": "tool", "content": None}, {"role": "user", "content": "a"}, {"role": "user"}]}
    assert without_documents(CaseRequest("/", others)).body == others
    assert without_documents(CaseRequest("/", {"prompt": [[1, 2]], "messages": [words]})).body["prompt"] == [[1, 2]]


def chunk(text, token, **more):
    return {"choices": [{"index": 0, "delta": {"content": text}, "token_ids": [token], **more}]}


def test_streams_are_compared_whatever_their_chunks():
    last = {"choices": [], "usage": {"completion_tokens": 2}}
    one = Answer(200, None, (chunk("a", 1), chunk("b", 2, finish_reason="stop"), last))
    joined = {"choices": [{"index": 0, "delta": {"content": "ab"}, "token_ids": [1, 2], "finish_reason": "stop"}]}
    assert CHAT.compared(one) == CHAT.compared(Answer(200, None, (joined, last)))
    assert CHAT.compared(one)["usage"] == {"completion_tokens": 2}
    assert CHAT.compared(one) != CHAT.compared(Answer(200, None, (chunk("a", 1), chunk("b", 3), last)))


def test_error_in_a_stream_is_compared():
    broken = Answer(200, None, (chunk("a", 1), {"error": {"message": "lost"}}))
    assert CHAT.compared(broken) != CHAT.compared(Answer(200, None, (chunk("a", 1),)))
