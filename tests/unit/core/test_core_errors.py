"""The exception hierarchy: client responses, and round trips between processes."""

import re

import msgspec
import pytest

from medialane.core import errors
from medialane.core.errors import ErrorReport, MedialaneError, Unavailable, from_report, to_report


def tree(cls=MedialaneError):
    return [cls, *(found for child in cls.__subclasses__() for found in tree(child))]


CLASSES = [cls for cls in tree() if cls.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_error_round_trips_between_processes(cls):
    error = cls("what happened", param="messages[0].content[1]", retry_after_s=3)
    report = msgspec.msgpack.decode(msgspec.msgpack.encode(to_report(error)), type=ErrorReport)
    found = from_report(report)
    assert type(found) is cls
    assert (found.message, found.param, found.retry_after_s) == ("what happened", "messages[0].content[1]", 3)


def test_code_of_a_newer_release_becomes_a_plain_error():
    found = from_report(ErrorReport("from_the_future", "what happened"))
    assert type(found) is MedialaneError
    assert (found.status, found.message) == (500, "what happened")


def test_codes_are_unique_and_stable_words():
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z0-9_]+", code) for code in codes)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_kind_and_status_agree(cls):
    assert (cls.kind == "invalid_request_error") == (400 <= cls.status < 500)


@pytest.mark.parametrize("cls", tree(Unavailable), ids=lambda cls: cls.__name__)
def test_overload_has_retry_after(cls):
    assert cls.status == 503
    assert cls("busy").retry_after_s == 1
    assert cls("never", retry_after_s=None).retry_after_s is None


def test_adding_the_request_field_preserves_the_error():
    found = errors.ArenaFull("full", retry_after_s=9).at("messages[2]")
    assert type(found) is errors.ArenaFull
    assert (found.message, found.param, found.retry_after_s) == ("full", "messages[2]", 9)
