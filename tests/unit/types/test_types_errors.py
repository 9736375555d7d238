"""The exception hierarchy: client responses, and round trips between processes."""

import importlib
import re
from http import HTTPStatus
from pathlib import Path

import msgspec
import pytest

import medialane
from medialane.types import errors
from medialane.types.errors import ErrorReport, MedialaneError, Unavailable, from_report, to_report


def tree(cls=MedialaneError):
    return [cls, *(found for child in cls.__subclasses__() for found in tree(child))]


def defining_modules():
    """Return the modules that define errors."""
    root = Path(medialane.__file__).parent
    files = [path for path in root.rglob("*.py") if re.search(r"^class \w+\(.*\bcode=", path.read_text(), re.MULTILINE)]
    return [".".join(("medialane", *path.relative_to(root).with_suffix("").parts)) for path in files]


MODULES = [importlib.import_module(name).__name__ for name in defining_modules()]
CLASSES = [cls for cls in tree() if cls.__module__ in MODULES]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_error_round_trips_between_processes(cls):
    error = cls("what happened", param="messages[0].content[1]", retry_after_s=3)
    report = msgspec.msgpack.decode(msgspec.msgpack.encode(to_report(error)), type=ErrorReport)
    found = from_report(report)
    assert type(found) is cls
    assert (found.message, found.param, found.retry_after_s) == ("what happened", "messages[0].content[1]", 3)


def test_class_that_another_process_could_not_rebuild_cannot_be_defined():
    with pytest.raises(TypeError, match="cannot be rebuilt"):

        class Unsendable(MedialaneError, code="unsendable"):
            def __init__(self, message: str, cause: Exception) -> None: ...

    assert type(from_report(ErrorReport("unsendable", "what happened"))) is MedialaneError


def test_code_of_a_newer_release_becomes_a_plain_error():
    found = from_report(ErrorReport("from_the_future", "what happened"))
    assert type(found) is MedialaneError
    assert (found.status, found.message) == (500, "what happened")


def test_codes_are_unique_and_stable_words():
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z0-9_]+", code) for code in codes)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_status_is_one_that_vllm_knows(cls):
    assert HTTPStatus(cls.status) >= HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_kind_and_status_agree(cls):
    assert (cls.kind in ("invalid_request_error", "permission_error", "rate_limit_error")) == (400 <= cls.status < 500)


@pytest.mark.parametrize("cls", tree(Unavailable), ids=lambda cls: cls.__name__)
def test_overload_has_retry_after(cls):
    assert cls.status == 503
    assert cls("busy").retry_after_s == 1
    assert cls("never", retry_after_s=None).retry_after_s is None


def test_adding_the_request_field_preserves_the_error():
    found = errors.ArenaFull("full", retry_after_s=9).at("messages[2]")
    assert type(found) is errors.ArenaFull
    assert (found.message, found.param, found.retry_after_s) == ("full", "messages[2]", 9)
