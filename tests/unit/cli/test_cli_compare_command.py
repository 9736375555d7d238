"""The command as a user runs it, over servers that run already."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from medialane.cli import main
from waiting import wait_until

SERVER = Path(__file__).with_name("compared_server.py")


@pytest.fixture
def servers(tmp_path):
    """Start a server that answers `num_answers` requests, and then none; return its URL."""
    running = []

    def start(num_answers=1000):
        port_file = tmp_path / f"port-{len(running)}"
        command = [sys.executable, str(SERVER), str(port_file), str(num_answers)]
        running.append(subprocess.Popen(command))
        wait_until(lambda: port_file.exists() and port_file.read_text(), "the server listens", 15)
        return f"http://127.0.0.1:{port_file.read_text()}"

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def requests(tmp_path):
    path = tmp_path / "batch.jsonl"
    bodies = [{"messages": [{"role": "user", "content": f"number {n}"}]} for n in range(6)]
    path.write_text("".join(json.dumps({"url": "/v1/chat/completions", "body": body}) + "\n" for body in bodies))
    return path


def test_two_servers_are_compared_and_the_report_written(servers, requests, tmp_path, capsys):
    out = tmp_path / "out"
    against = ["--against", f"old={servers()}", "--against", f"new={servers()}/v1"]
    assert main(["compare", "m", "--requests", str(requests), "--out", str(out), *against]) == 0
    shown = capsys.readouterr().out
    assert "answers: 6 of 6 equal" in shown
    assert json.loads((out / "report.json").read_text())["agreement"]["counts"] == {"equal": 6}


def test_ctrl_c_reports_what_was_measured(servers, requests, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "medialane", "compare", "m", "--requests", str(requests), "--concurrency", "1"]
    command += ["--out", str(out), "--against", f"old={servers()}", "--against", f"new={servers(num_answers=2)}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    replies = out / "turn-1-1.jsonl"
    wait_until(lambda: replies.exists() and len(replies.read_text().splitlines()) == 2, "two of six replies", 30)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=15)
    assert process.returncode == 130
    assert "answers: 2 of 2 equal" in shown
    assert "the comparison is not complete: replies so far: old 6, new 2" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--limit", "0"], "--limit must be positive"),
        (["--against", "nowhere"], "--against nowhere: it takes"),
        (["--port", "1"], "leave out --host and --port"),
        (["--requests", "/none.jsonl"], "--requests /none.jsonl: No such file"),
    ],
)
def test_argument_that_is_wrong_is_named(requests, tmp_path, capsys, flags, message):
    (tmp_path / "config.json").write_text("{}")
    assert main(["compare", str(tmp_path), "--requests", str(requests), *flags]) == 2
    assert message in capsys.readouterr().err
