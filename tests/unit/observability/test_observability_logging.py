import gc
import io
import json
import logging
import re
import sys
import time
import warnings
import weakref

import pytest

from medialane.observability import (
    ACCESS_LOGGER,
    JsonFormatter,
    LimitedHandler,
    LoggingConfig,
    PlainFormatter,
    as_text,
    configure,
    configure_child,
    is_access_line,
    request_id,
    trace_id,
    unchanged_levels,
)
from medialane.observability.logging import RepetitionLimit, redact


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


class Log:
    """A log whose clock is turned by hand."""

    def __init__(self):
        self.now = 0.0
        self._stream = io.StringIO()
        self.logger = logging.Logger("medialane.test")
        handler = LimitedHandler(self._stream, clock=lambda: self.now)
        handler.setFormatter(logging.Formatter("%(message)s"))
        self.logger.addHandler(handler)

    def lines(self):
        return self._stream.getvalue().splitlines()


def test_line_that_is_repeated_is_written_at_once_then_with_a_count_and_at_last_once_a_minute():
    log = Log()
    for second in range(0, 602, 2):  # a wrong secret
        log.now = float(second)
        log.logger.error("%s refuses this worker: %s", "10.0.0.1", "another secret")
    lines = log.lines()
    assert lines[0] == "10.0.0.1 refuses this worker: another secret"
    assert lines[1] == "10.0.0.1 refuses this worker: another secret (2 more in the last 6 s)"
    assert len(lines) < 15  # 301 without the limit
    assert sum(int(line.partition("(")[2].partition(" ")[0] or 1) for line in lines) in range(270, 302)


def test_recovery_is_written_and_a_problem_that_comes_back_is_new():
    log = Log()
    for now in (0, 1, 2):
        log.now = now
        log.logger.warning("lost")
    log.now = 3
    log.logger.info("ready")
    log.now = 7
    log.logger.info("something else")
    log.now = 200
    log.logger.warning("lost")
    assert log.lines() == ["lost", "ready", "lost (2 more in the last 7 s)", "something else", "lost"]


def test_different_lines_are_not_repetitions():
    log = Log()
    for worker in range(10):
        log.logger.warning("worker %d is lost", worker)
    assert len(log.lines()) == 10


def test_lines_of_one_place_are_bounded_however_they_differ():
    """A peer can choose what differs: its address, a name."""
    log = Log()
    for number in range(100_000):
        log.now = number / 2000
        log.logger.warning("a connection from %d is closed", number)
    lines = log.lines()
    assert len(lines) < 40
    assert any("more in the last" in line for line in lines)


def test_many_workers_that_become_ready_are_all_shown():
    log = Log()
    for worker in range(100):
        log.logger.info("worker %d is ready", worker)
    assert len(log.lines()) == 100


def test_lines_of_other_places_are_not_affected_by_a_flood():
    log = Log()
    for number in range(1000):
        log.logger.warning("flood %d", number)
    log.logger.warning("of another place")
    assert log.lines()[-1] == "of another place"


def test_exceptions_are_repetitions_only_if_they_are_equal():
    log = Log()
    for error in (ValueError("a"), ValueError("a"), ValueError("b")):
        log.logger.error("failed", exc_info=error)
    assert log.lines() == ["failed", "ValueError: a", "failed", "ValueError: b"]


def test_debugging_is_not_limited():
    log = Log()
    for _ in range(5):
        log.logger.debug("step")
    assert log.lines() == ["step"] * 5


def test_line_with_wrong_arguments_does_not_raise(capsys):
    Log().logger.warning("%d", "not a number")
    assert "Logging error" in capsys.readouterr().err


def test_count_of_repetitions_does_not_have_the_id_of_another_request(clock):
    stream, logger = io.StringIO(), logging.Logger("medialane.test")
    handler = LimitedHandler(stream, clock=clock)
    handler.setFormatter(PlainFormatter())
    logger.addHandler(handler)
    for _ in range(2):
        logger.warning("lost")
    clock.now += 10
    token = request_id.set("chatcmpl-1")
    logger.warning("of a request")
    request_id.reset(token)
    *_, counted, last = stream.getvalue().splitlines()
    assert "lost (1 more" in counted
    assert "chatcmpl-1" not in counted
    assert "[chatcmpl-1]: of a request" in last


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


@pytest.fixture
def streams_restored():
    stdout, stderr, excepthook = sys.stdout, sys.stderr, sys.excepthook
    yield
    sys.stdout, sys.stderr, sys.excepthook = stdout, stderr, excepthook
    logging.captureWarnings(False)


def as_json(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.usefixtures("root_restored", "streams_restored")
def test_json_line_has_time_level_logger_message_component_and_ids():
    stream = io.StringIO()
    configure(LoggingConfig(format="json"), stream, component="gateway-0")
    first, second = request_id.set("my-1"), trace_id.set("ab" * 16)
    logging.getLogger("medialane.gateway").warning("lost %s\nagain", "w0", extra={"fields": {"worker": "w0"}})
    request_id.reset(first)
    trace_id.reset(second)
    logging.getLogger("vllm.v1").warning("no request")
    line, other = as_json(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line.pop("ts")))
    assert line == {
        "level": "WARNING",
        "logger": "medialane.gateway",
        "msg": "lost w0\nagain",
        "component": "gateway-0",
        "request_id": "my-1",
        "trace_id": "ab" * 16,
        "worker": "w0",
    }
    assert other.keys() == {"ts", "level", "logger", "msg", "component"}


@pytest.mark.usefixtures("root_restored", "streams_restored")
def test_exception_is_a_member_of_its_line_and_redacted():
    stream = io.StringIO()
    configure(LoggingConfig(format="json"), stream)
    try:
        raise ValueError("GET https://user:pw@host/a.png?sig=abc")
    except ValueError:
        logging.getLogger("medialane").exception("failed")
    (line,) = as_json(stream)
    assert "ValueError: GET https://***@host/a.png?***" in str(line["exception"])
    assert line["msg"] == "failed"


@pytest.mark.usefixtures("root_restored", "streams_restored")
def test_what_code_prints_becomes_lines_of_json():
    stream = io.StringIO()
    configure(LoggingConfig(format="json"), stream, component="worker-1")
    sys.stdout.write("one\ntw")
    sys.stdout.write("o\n")
    sys.stderr.write("  5%\r 50%\r100%\n")
    sys.stderr.write("medialane: error: the model\nis missing")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    sys.excepthook(ValueError, ValueError("x"), None)
    lines = as_json(stream)
    assert [(line["logger"], line["msg"]) for line in lines[:4]] == [
        ("stdout", "one"),
        ("stdout", "two"),
        ("stderr", "100%"),
        ("stderr", "medialane: error: the model\nis missing"),
    ]
    assert [line["level"] for line in lines] == ["INFO", "INFO", "INFO", "ERROR", "WARNING", "CRITICAL"]
    assert {line["component"] for line in lines} == {"worker-1"}
    assert lines[4]["logger"] == "py.warnings"
    assert "ValueError: x" in str(lines[5]["exception"])


@pytest.mark.usefixtures("root_restored", "streams_restored")
def test_process_that_is_executed_logs_as_the_one_that_has_executed_it(monkeypatch, capfd):
    log = configure(LoggingConfig(format="json", level="error"), io.StringIO(), component="store")
    for name, value in log.environ().items():
        monkeypatch.setenv(name, value)
    configure_child("forkserver")
    logging.getLogger("medialane").warning("not this")
    logging.getLogger("medialane").error("this")
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["component"] == "store/forkserver"


@pytest.mark.usefixtures("root_restored", "streams_restored")
@pytest.mark.parametrize("format_", ["text", "json"])
def test_each_line_of_a_request_is_written_and_found_in_both_formats(format_):
    stream = io.StringIO()
    configure(LoggingConfig(format=format_), stream)
    for _ in range(300):
        logging.getLogger(ACCESS_LOGGER).info("POST /v1/completions 200")
    logging.getLogger("medialane.gateway").warning("of medialane.access: no")
    lines = stream.getvalue().splitlines()
    assert [is_access_line(line) for line in lines] == [True] * 300 + [False]


def test_line_of_json_is_shown_as_text():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("worker-0"))
    logger = logging.Logger("medialane.x")
    logger.addHandler(handler)
    logger.error("failed", exc_info=ValueError("no"))
    (line,) = stream.getvalue().splitlines()
    text = as_text(line)
    assert text[0].endswith(" ERROR medialane.x: failed")
    assert text[-1] == "ValueError: no"
    assert as_text("plain") == ["plain"]


def test_lines_that_may_recur_hold_nothing_that_was_logged():
    """A traceback's frames have what a preparer has decoded."""

    class Decoded:
        pass

    def fail(decoded):
        raise MemoryError(decoded)

    limit, held = RepetitionLimit(), []
    for number in range(2):
        decoded = Decoded()
        held.append(weakref.ref(decoded))
        try:
            fail(decoded)
        except MemoryError:
            record = logging.LogRecord("a", logging.ERROR, "a.py", 1, "failed: %s", (decoded,), sys.exc_info())
            limit.admit(record, float(number))
        del decoded, record
    gc.collect()
    assert [each() for each in held] == [None, None]


@pytest.mark.parametrize("format_", [PlainFormatter(), JsonFormatter("test")])
@pytest.mark.parametrize("again", ["http://", "https://a", "data:", "bearer ", "a://u:p@", "http://a?b "])
def test_long_line_is_cut_then_redacted(format_, again):
    record = logging.LogRecord("vllm", logging.ERROR, "f.py", 1, again * (1_000_000 // len(again)), (), None)
    started = time.thread_time()
    line = format_.format(record)
    assert time.thread_time() - started < 0.1
    assert len(line) < 70_000


def test_secret_of_a_cut_url_is_not_shown():
    for number in range(3900, 4100):
        text = (
            f"{'x' * number} http://user:secret@host/a?secret=1 {'y' * 40_000} http://user:secret@host {'z' * number}"
        )
        record = logging.LogRecord("vllm", logging.ERROR, "f.py", 1, text, (), None)
        assert "secret" not in JsonFormatter("test").format(record)
