import os

import pytest

from medialane.cluster import ProcessLog


@pytest.fixture
def log(tmp_path):
    return ProcessLog(tmp_path / "part.log", 1000)


def write(log: ProcessLog, text: str, *, read: bool = True) -> None:
    descriptor = log.open()
    os.write(descriptor, text.encode())
    os.close(descriptor)
    if read:
        log.read()


def test_lines_are_delivered_once_and_only_when_complete(log):
    write(log, "one\ntw", read=False)
    assert log.read() == ["one"]
    assert log.read() == []
    write(log, "o\n", read=False)
    assert log.read() == ["two"]


def test_log_of_a_silent_process_is_empty(log):
    assert log.read() == []
    assert log.tail(1) == []


def test_colours_and_rewritten_progress_bars_are_removed(log):
    write(log, "\x1b[31mred\x1b[0m\n 1%\r 50%\r100%\n", read=False)
    assert log.read() == ["red", "100%"]


def test_too_long_file_is_truncated_to_its_newer_half(log):
    writer = log.open()
    for i in range(60):
        os.write(writer, f"line {i:014}\n".encode())
    log.read()
    assert log.path.stat().st_size == 0
    assert log.path.with_suffix(".old").read_text().splitlines()[-1] == f"line {59:014}"
    os.write(writer, b"after\n")
    os.close(writer)
    assert log.read() == ["after"]
    assert log.path.read_text() == "after\n"


def test_first_exception_is_reported_as_the_cause(log):
    write(
        log,
        "INFO loading\n"
        "(EngineCore pid=7) ERROR ValueError: max_num_batched_tokens is too small\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n",
    )
    assert log.first_exception() == "ValueError: max_num_batched_tokens is too small"


def test_error_that_only_says_that_the_engine_failed_is_reported_by_its_cause(log):
    write(
        log,
        "Traceback\nValueError: No common block size for 7\n"
        "medialane: error: vLLM failed to start: Engine core initialization failed. See root cause above.\n",
    )
    assert log.failure_report("worker 0", "exit status 2") == (
        "worker 0: vLLM failed to start: ValueError: No common block size for 7"
    )


def test_report_of_a_silent_process_has_its_exit_status(log):
    assert log.failure_report("worker 0", "killed by SIGKILL") == "worker 0 did not start: killed by SIGKILL"


def test_report_shows_the_end_of_the_log_and_where_it_is(log):
    write(log, "".join(f"line {i}\n" for i in range(40)))
    head, where, *lines = log.failure_report("worker 0", "exit status 1").splitlines()
    assert head == "worker 0 did not start: exit status 1"
    assert str(log.path) in where
    assert lines[-1] == "  | line 39"
    assert len(lines) == 15


def test_tail_after_a_restart_omits_the_previous_run(log):
    write(log, "ValueError: of the first life\n")
    os.close(log.open())
    assert log.first_exception() is None


def test_lines_of_json_are_delivered_whole_and_shown_as_text(log):
    head = '{"ts":"2026-01-31T12:00:00.000Z","level":'
    failed = f'{head}"ERROR","logger":"vllm","msg":"{"m" * 3000}","exception":"Traceback\\nValueError: too small"}}'
    reported = f'{head}"ERROR","logger":"stderr","msg":"medialane: error: no such model\\nsee the log"}}'
    write(log, f"{failed}\n{reported}\n", read=False)
    assert log.read() == [failed, reported]
    assert log.first_exception() == "ValueError: too small"
    assert log.reported_error() == "no such model"
    assert log.tail(1) == ["see the log"]
