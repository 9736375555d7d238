import io
import logging

import pytest

from medialane.observability.logging import (
    LoggingConfig,
    RateLimitedWarning,
    configure,
    redact,
    request_id,
    unchanged_levels,
)


@pytest.fixture
def root_restored():
    root, ours = logging.getLogger(), logging.getLogger("medialane")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], level, ours_level = before
    root.setLevel(level)
    ours.setLevel(ours_level)


@pytest.mark.usefixtures("root_restored")
def test_line_has_level_location_and_request():
    stream = io.StringIO()
    configure(LoggingConfig(level="info"), stream)
    token = request_id.set("chatcmpl-1")
    logging.getLogger("medialane.gateway.workers").info("worker %s is ready", "w0")
    request_id.reset(token)
    logging.getLogger("medialane.x").debug("not this")
    logging.getLogger("aiohttp").info("nor this")
    assert stream.getvalue().endswith(" INFO medialane.gateway.workers [chatcmpl-1]: worker w0 is ready\n")
    assert stream.getvalue().count("\n") == 1


@pytest.mark.usefixtures("root_restored")
def test_secrets_in_a_traceback_are_redacted():
    stream = io.StringIO()
    configure(LoggingConfig(), stream)
    try:
        raise ValueError("GET https://user:pw@host/a.png?sig=abc")
    except ValueError:
        logging.getLogger("medialane").exception("failed")
    text = stream.getvalue()
    assert "ValueError" in text
    assert "pw" not in text
    assert "abc" not in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see data:image/png;base64,iVBORw0KGgo= there", "see data:image/png;base64,... there"),
        ("https://u:p@h/x", "https://***@h/x"),
        ("at 'https://h/x?Signature=s&b=1'", "at 'https://h/x?***'"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("nothing to hide: a@b, x?y", "nothing to hide: a@b, x?y"),
    ],
)
def test_secrets_are_redacted(text, expected):
    assert redact(text) == expected


def test_client_triggered_logs_are_rate_limited(caplog):
    now = 0.0
    warn = RateLimitedWarning(logging.getLogger("medialane.test"), every_s=10, clock=lambda: now)
    for now in (0.0, 1.0, 9.9, 10.0, 11.0):
        warn("refused at %g", now)
    assert [record.getMessage() for record in caplog.records] == [
        "refused at 0",
        "refused at 10 (2 more times since this was last logged)",
    ]


def test_levels_that_a_library_raises_are_restored():
    handler, root = logging.StreamHandler(), logging.getLogger()
    before = root.level
    root.addHandler(handler)
    try:
        with unchanged_levels():
            root.setLevel(logging.ERROR)
            handler.setLevel(logging.ERROR)
        assert (root.level, handler.level) == (before, logging.NOTSET)
    finally:
        root.removeHandler(handler)
