"""Errors in flags and model are reported before anything is imported or started."""

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from installed_packages import install
from medialane.cluster import ModelHub, check_flags, check_model, check_start, find_on_hub
from medialane.types.errors import StartupFailed

GOOD = [
    ["--max-model-len", "8k", "--max_num_seqs=16", "-tp", "2"],
    ["--limit-mm-per-prompt", '{"image": 8}', "--hf-overrides.a.b", "c", "--mm-processor-kwargs.x=1"],
    ["--dtype=auto", "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.5"],
    ["--served-model-name", "one", "two", "--max-log-len", "None"],
    ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser=qwen3"],
    ["--tool-call-parser", "mine", "--tool-parser-plugin", "mine.py"],
    ["--tensor-parallel", "2"],  # argparse takes abbreviations
    ["--chat-template", "-", "-O3", "--seed", "-1"],
    ["--max-model-len", "-1", "--gpu-memory-utilization=1", "--max-logprobs=-1", "--video-pruning-rate", "None"],
    ["--max-num-seqs", "0", "--max_num_seqs", "8"],  # the last one counts
    ["--max-model-len", "AUTO", "--max-num-batched-tokens", "1.5k", "--kv-cache-memory-bytes", "2G"],
    ["--cudagraph-capture-sizes", "1", "2", "--max-num-queued-tokens", "None", "--max-model-len=8K"],
]


@pytest.mark.parametrize("words", GOOD, ids=" ".join)
def test_flags_accepted_by_vllm_pass(words):
    check_flags(words)


BAD = {
    "vLLM does not know --no-such-flag": ["--no-such-flag"],
    "--max-modl-len; did you mean --max-model-len?": ["--max-modl-len", "8"],
    "--max-num-seqs many: must be a whole number": ["--max-num-seqs", "many"],
    "--max-model-len abc: must be a whole number, one like 8k": ["--max-model-len", "abc"],
    "--max-model abc: must be a whole number, one like 8k": ["--max-model", "abc"],
    "--max-model-len 1.5K: must be a whole number": ["--max-model-len=1.5K"],
    "--max-num-batched-tokens auto: must be a whole number": ["--max-num-batched-tokens", "auto"],
    "--max-num-batched-tokens 1x: must be a whole number": ["--max-num-batched-tokens=1x"],
    "--kv-cache-memory-bytes lots: must be a whole number": ["--kv-cache-memory-bytes", "lots"],
    "--cudagraph-capture-sizes b: must be whole numbers": ["--cudagraph-capture-sizes", "1", "b"],
    "--gpu-memory-utilization half: must be a number": ["--gpu-memory-utilization=half"],
    "--dtype nonsense: must be one of auto, ": ["--dtype", "nonsense"],
    "--limit-mm-per-prompt image=8: must be JSON": ["--limit-mm-per-prompt", "image=8"],
    "--max-num-seqs needs a value": ["--max-num-seqs", "--enforce-eager"],
    "--dtype needs a value": ["--dtype"],
    "--ssl-keyfile /nowhere/key.pem: there is no such file": ["--ssl-keyfile", "/nowhere/key.pem"],
    "--enable-auto-tool-choice needs --tool-call-parser": ["--enable-auto-tool-choice"],
    "--tool-call-parser nobodys: must be one of": ["--enable-auto-tool-choice", "--tool-call-parser", "nobodys"],
    "--reasoning-parser nobodys: must be one of": ["--reasoning-parser=nobodys"],
    "--uds is not for vLLM here: the gateway listens": ["--uds", "/tmp/x"],
    "--model is not for vLLM here": ["--model=x"],
    "--allowed-media-domains is not for vLLM here": ["--allowed-media-domains", "example.org", "example.com"],
    "--allowed-local-media-path is not for vLLM here": ["--allowed-local-media-path=/srv/media"],
    "--port is not for vLLM here": ["--port", "80"],
    "--gpu-memory-utilization 7: must be > 0 and <= 1": ["--gpu-memory-utilization", "7"],
    "--gpu-memory-utilization nan: must be > 0 and <= 1": ["--gpu-memory-utilization=nan"],
    "--max-num-seqs 0: must be >= 1": ["--max_num_seqs=0"],
    "--max-model-len -2: must be >= -1": ["--max-model-len", "-2"],
    "--max-num-batched-tokens 0: must be >= 1": ["--max-num-batched-tokens=0"],
    "--video-pruning-rate 1: must be >= 0.0 and < 1.0": ["--video-pruning-rate", "1"],
    "-tp 0: must be >= 1": ["-tp", "0"],
    "--headless is not for vLLM here": ["--headless"],
}


@pytest.mark.parametrize("message", BAD)
def test_flag_rejected_by_vllm_is_named(message):
    with pytest.raises(StartupFailed) as refused:
        check_flags(BAD[message])
    assert message in refused.value.message


def test_flags_of_an_untested_vllm_are_left_to_it(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "vllm", "0.99.0")
    check_flags(["--new-in-the-next-version"])


@pytest.mark.parametrize("name", ["s3://bucket/model", "/models/x.gguf"])
def test_model_resolved_by_vllm_passes(name):
    check_model(name, [], {})


@pytest.mark.parametrize(
    ("words", "environ"),
    [(["--hf-config-path", "x"], {}), ([], {"VLLM_USE_MODELSCOPE": "True"})],
    ids=["path", "scope"],
)
def test_model_of_another_hub_is_not_checked(words, environ):
    check_model("org/model-that-no-hub-has", words, environ)


@pytest.mark.parametrize("name", ["/absent/model", "./model", "a/b/c", "../x", "--model"])
def test_path_without_a_model_is_rejected(name):
    with pytest.raises(StartupFailed, match="is neither"):
        check_model(name, [], {})


def test_folder_without_a_configuration_is_no_model(tmp_path):
    with pytest.raises(StartupFailed, match=r"no config\.json"):
        check_model(str(tmp_path), [], {})
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path), [], {})


@pytest.mark.parametrize("command", ["serve", "gateway", "worker"])
def test_every_command_reports_it_without_importing_vllm(command, tmp_path):
    """In CPU seconds: the machine may be busy. Importing vLLM's parser takes 10."""
    import resource
    import subprocess

    (tmp_path / "config.json").write_text("{}")
    own = {
        "serve": ["--port", "0"],
        "gateway": ["--worker", "unix:/tmp/w.sock", "--store", "none", "--port", "0"],
        "worker": ["--listen", f"unix:{tmp_path}/w.sock"],
    }
    argv = [sys.executable, "-m", "medialane", command, str(tmp_path), *own[command], "--", "--dtype", "nonsense"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    result = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (result.returncode, "--dtype nonsense" in result.stderr) == (2, True), result.stderr
    cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_s < 4, f"{cpu_s:.1f} s of CPU, {time.monotonic() - started:.1f} s in all"


def installed(folder, monkeypatch, *, torch_cuda, torchvision):
    """A site-packages with vLLM, a torch with or without CUDA, and a torchvision linked against `torchvision`."""
    for name in ("vllm", "torch", "torchvision"):
        (folder / name / "lib").mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    if torch_cuda:
        (folder / "torch/lib/libtorch_cuda.so").touch()
    (folder / "torchvision/_C.so").write_bytes(torchvision)
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    monkeypatch.syspath_prepend(str(folder))
    for name in ("vllm", "torch", "torchvision", "medialane_cpu_torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return str(folder / "model")


def test_cuda_torchvision_beside_a_cpu_torch_is_reported_with_its_remedy(tmp_path, monkeypatch):
    model = installed(tmp_path, monkeypatch, torch_cuda=False, torchvision=b"ELF libtorch_cuda.so")
    with pytest.raises(StartupFailed, match=r"pip install ./packages/medialane-cpu-torch"):
        check_start(model, [], {})
    monkeypatch.setitem(sys.modules, "medialane_cpu_torch", sys)
    check_start(model, [], {})


@pytest.mark.parametrize(
    ("torch_cuda", "torchvision"), [(True, b"ELF libtorch_cuda.so"), (False, b"ELF libtorch_cpu.so")]
)
def test_builds_that_fit_start(torch_cuda, torchvision, tmp_path, monkeypatch):
    check_start(installed(tmp_path, monkeypatch, torch_cuda=torch_cuda, torchvision=torchvision), [], {})


# An unavailable model is reported within seconds, with its name and hub.


class Hub(ThreadingHTTPServer):
    """Answers each path with the status of `statuses`, 404 where it has none."""

    daemon_threads = True

    def __init__(self, cache):
        super().__init__(("127.0.0.1", 0), Handler)
        self.settings = {"url": f"http://127.0.0.1:{self.server_port}", "cache": str(cache), "deadline_s": 1.0}
        self.hub = ModelHub(**self.settings)
        self.statuses, self.headers, self.asked, self.delay_s = {}, {}, [], 0.0


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.server.asked.append(self.path)
        time.sleep(self.server.delay_s)  # time: a slow hub's
        self.send_response(self.server.statuses.get(self.path, 404))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_args):
        """Quiet."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = Hub(tmp_path)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("name", ["config.json", "params.json"])
def test_existing_hub_model_passes(hub, name):
    hub.statuses[f"/org/model/resolve/main/{name}"] = 200
    find_on_hub("org/model", hub=hub.hub)


def test_revision_is_the_one_passed_to_vllm(hub):
    hub.statuses["/org/model/resolve/v2/config.json"] = 200
    find_on_hub("org/model", "v2", hub=hub.hub)
    assert hub.asked == ["/org/model/resolve/v2/config.json"]


def refusal(hub, model="org/model", **settings):
    with pytest.raises(StartupFailed) as refused:
        find_on_hub(model, hub=ModelHub(**hub.settings | settings))
    assert model in refused.value.message
    return refused.value.message


def test_missing_hub_model_is_named(hub):
    assert "does not have it" in refusal(hub)


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (401, {}, "HF_TOKEN"),
        (403, {"x-error-code": "GatedRepo"}, "requires an HF_TOKEN"),
        (503, {}, "returned status 503"),
    ],
)
def test_hub_rejection_is_reported_with_its_reason(hub, status, headers, said):
    hub.headers = headers
    for name in ("config.json", "params.json"):
        hub.statuses[f"/org/model/resolve/main/{name}"] = status
    message = refusal(hub)
    assert said in message
    assert hub.hub.url in message


def test_unresponsive_hub_times_out(hub):
    hub.delay_s = 10.0
    started = time.monotonic()
    message = refusal(hub)
    assert "within" in message or "timed out" in message
    assert time.monotonic() - started < 8


def test_unreachable_hub_is_named(hub):
    assert "cannot be reached" in refusal(hub, url="http://127.0.0.1:1")


def test_busy_hub_is_left_to_vllms_retries(hub):
    hub.statuses["/org/model/resolve/main/config.json"] = 429
    find_on_hub("org/model", hub=hub.hub)


def test_offline_mode_makes_no_request(hub):
    assert "HF_HUB_OFFLINE" in refusal(hub, is_disabled=True)
    assert hub.asked == []


def test_cached_model_makes_no_request(hub, tmp_path):
    repository = tmp_path / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    find_on_hub("org/model", hub=hub.hub)
    assert hub.asked == []
