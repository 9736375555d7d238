"""The command in a separate process, with small scripts replacing gateway and workers."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from medialane.cli import render
from medialane.cli.gateway_command import check_api_key
from medialane.cli.serve import announce, for_ray
from medialane.config import Config, load_config, settings_environ
from medialane.types.errors import StartupFailed
from waiting import wait_until

SERVE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
script = sys.argv.pop(1)
from scripted_processes import script_part
from medialane.cli.main import main
from medialane.cluster import local
def process_specs(_config, _model, _vllm_args, run, **_):
    return [script_part(run.folder, f"{run.label} worker 0".strip(), script, stop_timeout_s=20.0)]
local.process_specs = process_specs
sys.exit(main(["serve", *sys.argv[1:]]))
"""
IDLE = "print('hello', flush=True); ready(); stay()"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); stay()"


class Served:
    """A running command: what it printed so far, and where it keeps its sockets and logs."""

    def __init__(self, process, stdout, runtime):
        self.process = process
        self.stdout = stdout
        self.runtime = runtime

    def wait_for(self, text, timeout_s=15.0):
        def printed_or_ended():
            return text in self.stdout.read_text() or self.process.poll() is not None

        wait_until(printed_or_ended, text, timeout_s, more=self.stdout.read_text)
        assert text in self.stdout.read_text()

    def send(self, number):
        self.process.send_signal(number)

    def end(self):
        return self.process.wait(15), self.stdout.read_text()


@pytest.fixture
def serve(tmp_path):
    """Start the command; the folder of its sockets and logs is a private one. Everything is gone afterwards."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    started = []

    def start(script, *flags, models=()):
        """`models` are the tables of a file, instead of one model."""
        runtime = Path(tempfile.mkdtemp(dir="/tmp"))
        output = tmp_path / f"output-{len(started)}"
        helpers = str(Path(__file__).parents[1] / "cluster")
        file = tmp_path / "models.toml"
        file.write_text("".join(f"[models.{name}]\nmodel = '{model}'\n" for name in models))
        which = ["--config", str(file)] if models else [str(model)]
        words = [sys.executable, "-c", SERVE, helpers, script, *which, "--arena-size", "16MiB", *flags]
        environ = {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(runtime), "PATH": "/usr/bin:/bin"}
        environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        with output.open("wb") as stdout:
            process = subprocess.Popen(words, stdout=stdout, stderr=subprocess.STDOUT, env=environ)
        started.append(Served(process, output, runtime))
        return started[-1]

    yield start
    for served in started:
        served.process.kill()
        served.process.wait()
        subprocess.run(["rm", "-rf", served.runtime], check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_everything_cleanly(serve, number):
    served = serve(IDLE, "--port", "0")
    served.wait_for("Ctrl-C stops it")
    served.send(number)
    status, text = served.end()
    assert status == 0, text
    assert "curl http://127.0.0.1:" in text
    assert list(served.runtime.iterdir()) == []


def test_several_models_are_served_behind_one_port(serve):
    served = serve(IDLE, "--port", "0", models=("vision", "text"))
    served.wait_for("Ctrl-C stops it", 30)
    text = served.stdout.read_text()
    assert "medialane serves 2 models at http://127.0.0.1:" in text
    assert "\n  vision: 1 worker\n  text: 1 worker\n" in text
    for name in ("vision worker 0", "text worker 0", "name router"):
        assert f"{name}: ready after " in text
    url = re.search(r"(http://127\.0\.0\.1:\d+)/v1", text)[1]
    with pytest.raises(urllib.error.HTTPError) as answered:
        urllib.request.urlopen(f"{url}/v1/models")
    assert answered.value.status == 503
    assert b"no model serves yet" in answered.value.read()
    served.send(signal.SIGTERM)
    status, text = served.end()
    assert status == 0, text
    assert list(served.runtime.iterdir()) == []


def test_file_with_one_model_needs_no_router(serve):
    served = serve(IDLE, "--port", "0", models=("vision",))
    served.wait_for("Ctrl-C stops it", 30)
    text = served.stdout.read_text()
    assert "medialane serves vision with 1 worker" in text
    assert "router" not in text
    served.send(signal.SIGTERM)
    assert served.end()[0] == 0


def test_second_signal_does_not_wait(serve):
    served = serve(STUBBORN, "--port", "0")
    served.wait_for("Ctrl-C stops it")
    started = time.monotonic()
    served.send(signal.SIGINT)
    served.wait_for("interrupt again to kill")
    served.send(signal.SIGINT)
    status, _ = served.end()
    assert status == 130
    assert time.monotonic() - started < 10


def test_signal_during_the_start_aborts_it(serve):
    served = serve("stay()", "--port", "0")
    served.wait_for("worker 0: starting")
    served.send(signal.SIGTERM)
    status, text = served.end()
    assert status == 0
    assert "Ctrl-C stops it" not in text


def test_failed_start_reports_the_reason_and_keeps_the_log(serve):
    served = serve("raise ValueError('no such quantisation')", "--port", "0")
    status, text = served.end()
    assert status == 2
    assert "medialane: error: worker 0 did not start: ValueError: no such quantisation" in text
    (folder,) = served.runtime.iterdir()
    assert f"logs: {folder}\n" in text
    assert text.endswith(f"\nthe logs are in {folder}\n")
    assert "no such quantisation" in (folder / "worker-0.log").read_text()


def test_logs_of_a_run_in_which_a_process_failed_are_kept(serve):
    fails = "print('once', flush=True); ready(); time.sleep(0.3); sys.exit(1)"  # time: it fails while it serves
    served = serve(fails, "--port", "0")
    served.wait_for("restarting")
    served.send(signal.SIGTERM)
    status, text = served.end()
    assert status == 0
    (folder,) = served.runtime.iterdir()
    assert f"the logs are kept in {folder}\n" in text
    assert "once" in (folder / "worker-0.log").read_text()


def test_logs_are_appended_in_a_folder_of_choice_and_stay(serve, tmp_path):
    chosen = tmp_path / "new" / "logs"
    for _ in range(2):
        served = serve(IDLE, "--port", "0", "--log-dir", str(chosen))
        served.wait_for("Ctrl-C stops it")
        served.send(signal.SIGTERM)
        status, text = served.end()
        assert status == 0, text
        assert f"logs: {chosen}\n" in text
        assert list(served.runtime.iterdir()) == []
    assert (chosen / "worker-0.log").read_text() == "hello\n" * 2


def test_folder_of_logs_is_used_by_one_run(serve, tmp_path):
    first = serve(IDLE, "--port", "0", "--log-dir", str(tmp_path))
    first.wait_for("Ctrl-C stops it")
    status, text = serve(IDLE, "--port", "0", "--log-dir", str(tmp_path)).end()
    assert status == 2
    assert f"--log-dir {tmp_path} is in use by another `medialane serve`" in text
    first.send(signal.SIGTERM)
    assert first.end()[0] == 0


def test_folder_of_logs_that_cannot_be_made_is_named(serve):
    status, text = serve(IDLE, "--port", "0", "--log-dir", "/proc/logs").end()
    assert status == 2
    assert "medialane: error: --log-dir /proc/logs: " in text


def test_port_in_use_is_reported_before_anything_starts(serve):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        served = serve(IDLE, "--port", str(taken.getsockname()[1]))
        status, text = served.end()
    assert status == 2
    assert text.startswith("medialane: error: cannot listen on 127.0.0.1")
    assert text.count("\n") == 1


def test_logs_are_shown_on_request(serve):
    served = serve(IDLE, "--port", "0", "--verbose")
    served.wait_for("[worker 0] hello")


def test_announcement_reflects_the_flags_relevant_to_clients():
    config = load_config({"workers": "2"}, environ={})
    text = announce(config, "m", ["--served-model-name", "vision"], needs_key=True)
    assert "2 workers at http://127.0.0.1:8000 (base_url of OpenAI clients: http://127.0.0.1:8000/v1)" in text
    assert "Authorization: Bearer" in text
    assert '"model": "vision"' in text
    assert "-k" not in text.split()
    assert "/v1/chat/completions" in text


def test_announcement_of_a_pooling_model_has_an_endpoint_that_it_has():
    text = announce(load_config({}, environ={}), "m", ["--runner=pooling"])
    assert "http://127.0.0.1:8000/pooling" in text


def test_address_of_the_render_endpoint_is_announced():
    assert "/v1/chat/completions/render" in announce(render.without_workers(Config()), "model", [])


def test_secrets_in_the_command_line_are_refused_with_ray():
    with pytest.raises(StartupFailed, match="VLLM_API_KEY"):
        for_ray(Config(), ["--api-key"], {})


def test_gateways_of_other_nodes_need_the_files_of_admin_and_metrics_keys():
    flags = {"ray": True, "gateway-nodes": "each"}
    for name in ("ADMIN", "METRICS"):
        with pytest.raises(StartupFailed, match=f"--{name.lower()}-key-file"):
            for_ray(load_config(flags, environ={f"MEDIALANE_{name}_KEY": "k"}), [], {})
    config = for_ray(load_config(flags | {"admin-key-file": "/etc/key"}, environ={}), [], {})
    assert settings_environ(config)["MEDIALANE_ADMIN_KEY_FILE"] == "/etc/key"


def test_gateways_of_other_nodes_need_a_key_if_this_one_has():
    assert not for_ray(Config(), [], {}).gateway.require_api_key
    assert for_ray(Config(), [], {"VLLM_API_KEY": "k"}).gateway.require_api_key
    config = for_ray(load_config({}, environ={"MEDIALANE_API_KEYS": "k"}), [], {})
    assert config.gateway.require_api_key
    assert "MEDIALANE_API_KEYS" not in settings_environ(config)
    with pytest.raises(StartupFailed, match="--require-api-key"):
        check_api_key(load_config(environ=settings_environ(config)), {})
