"""The matrix of uploads for transcription and translation."""

import io

import pytest
import soundfile

from medialane.tools.check import Answer, Upload
from medialane.tools.check.kinds import SPEECH


def files(case):
    return [value for _, value in case.make().form if isinstance(value, Upload)]


@pytest.mark.parametrize("kind", SPEECH, ids=lambda kind: kind.name)
def test_cases_are_posted_to_the_kinds_route_and_have_names_of_their_own(kind):
    cases = list(kind.cases({}))
    assert {case.make().path for case in cases} == {kind.route}
    assert len({case.name for case in cases}) == len(cases)
    assert {case.varies for case in cases} - {""} <= {case.name for case in cases}


#: Cases whose file is not audio.
UNREADABLE = {"damaged", "an empty file", "no audio", "a file that is too large"}


def test_some_case_is_longer_than_a_clip_and_some_have_no_audio():
    transcription = SPEECH[0]
    by_name = {case.name: files(case) for case in transcription.cases({})}
    sound = {name: found[0].data for name, found in by_name.items() if found and name not in UNREADABLE}
    lengths = {name: soundfile.info(io.BytesIO(data)).duration for name, data in sound.items()}
    assert lengths.pop("audio that is too long") > 600  # vLLM's limit
    assert 60 < max(lengths.values()) < 600
    assert len(by_name["a file that is too large"][0].data) > 25 << 20  # vLLM's limit
    assert not by_name["no file"]
    assert not by_name["text instead of a file"]


def test_model_of_a_case_replaces_the_servers():
    (another,) = [case for case in SPEECH[0].cases({}) if case.name == "another model"]
    assert dict(another.make().form)["model"] == "nobody/nothing"


def event(text, reason=None):
    return {"choices": [{"delta": {"content": text}, "finish_reason": reason}]}


def test_streams_are_equal_whatever_their_pieces_are():
    compared = SPEECH[0].compared
    one = Answer(200, None, (event("ab"), event("c", "stop"), {"choices": [], "usage": {"total_tokens": 3}}))
    other = Answer(
        200, None, (event("a"), event("bc"), event("", "stop"), {"choices": [], "usage": {"total_tokens": 3}})
    )
    another = Answer(200, None, (event("abc", "length"), {"choices": [], "usage": {"total_tokens": 3}}))
    assert compared(one) == compared(other) != compared(another)
