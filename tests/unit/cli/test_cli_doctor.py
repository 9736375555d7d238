import json
import socket
from pathlib import Path

import pytest

from medialane.cli import doctor, main
from medialane.config import load_config
from medialane.wire import TcpAddress

CRASH = "import os; os.abort()"
#: Of a build that does not fit its torch.
BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')"


class Installation:
    """A folder that the processes which load libraries search before site-packages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stand_ins: dict[str, str | None] = {}

    def library(self, name: str, code: str) -> None:
        (self._folder / f"{name}.py").write_text(code)

    def stand_in(self, module: str, code: str) -> None:
        """Put code in the place of one of our modules, which would load vLLM or look at the kernel."""
        self._at_start(module, code)

    def remove(self, library: str) -> None:
        self._at_start(library, None)

    def _at_start(self, module: str, code: str | None) -> None:
        self._stand_ins[module] = code
        self.library("sitecustomize", _START.format(stand_ins=self._stand_ins))


#: Python imports `sitecustomize` when it starts.
_START = """
import sys, types
for name, code in {stand_ins!r}.items():
    sys.modules[name] = module = code and types.ModuleType(name)
    exec(code or "", module and module.__dict__)
"""


@pytest.fixture
def installation(tmp_path, monkeypatch):
    folder = tmp_path / "installation"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return Installation(folder)


@pytest.fixture
def light(installation):
    """Replaces the libraries that take long to load."""
    for name in ("torch", "transformers"):
        installation.library(name, "__version__ = '2.13.0'")
    installation.library("torchvision", BROKEN)
    installation.stand_in(
        "medialane.vllm_bridge.seams.probe",
        "def probe(): return []\ndef summary(broken): return 'vLLM 0.32.0: 64 private seams, all found'",
    )


@pytest.mark.usefixtures("light")
def test_every_check_has_a_verdict_and_failures_have_advice(capsys):
    assert main(["doctor", "--json", "--port", "0", "--arena-size", "16MiB"]) == 1
    findings = {f["name"]: f for f in json.loads(capsys.readouterr().out)}
    expected = {"python", "vllm", "torch", "torchvision", "devices", "shared memory", "kernel", "open files", "port"}
    assert expected <= set(findings)
    assert findings["torchvision"]["verdict"] == "fail"
    assert all(f["advice"] for f in findings.values() if f["verdict"] != "ok")
    assert findings["vLLM plugin"]["verdict"] == "ok"


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def model_findings(installation, capsys, report, model):
    installation.stand_in("medialane.vllm_bridge.engine.engine_options", report)
    main(["doctor", model, "--json", "--port", "0", "--", "--max-model-len", "99"])
    found = {f["name"]: f for f in json.loads(capsys.readouterr().out)}
    return {
        name: found[name] for name in ("model", "prefill", "image", "audio", "prompts", "embeddings") if name in found
    }


_SPLIT = """
SPLIT = {"connector": "Connector", "not_split": ""}
"""
_ALL = (
    _SPLIT
    + """
image = {"limit": 3, "stage": "features", "why_not_features": "", "max_pixels": 99, "counted_by": "grid",
         "is_predicted": True}
media = {"modalities": {"image": image}, "accepts_item_options": True, "merge_size": 2, "predicts_image_tokens": False}
def model_report(_model, _flags): return {"architecture": "A", "media": media, "no_embeddings": "", **SPLIT}
"""
)
_TEXT = (
    _SPLIT
    + """
def model_report(_model, _flags): return {"architecture": "A", "media": None, "no_embeddings": "", **SPLIT}
"""
)

#: Takes the name of the model as the architecture, and vLLM's flags as the reasons.
_REASONS = """
SPLIT = {"connector": "", "not_split": "--role decode is not possible"}
one = {"limit": 1, "stage": "decoded", "max_pixels": None, "counted_by": "", "is_predicted": False}
media = {"accepts_item_options": False, "merge_size": 1, "predicts_image_tokens": False}

def model_report(model, flags):
    modalities = {"audio": one | {"why_not_features": flags[0]}}
    return {"architecture": model, "media": media | {"modalities": modalities}, "no_embeddings": flags[1], **SPLIT}
"""
_UNKNOWN = """
def model_report(_model, _flags): raise ValueError('no such model')
"""
_FLAGS = """
from medialane.types.errors import StartupFailed
def model_report(_model, _flags): raise StartupFailed('no such flag')
"""


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(
    ("report", "verdicts", "text"),
    [
        (
            _REASONS,
            {"model": "ok", "prefill": "ok", "audio": "warn", "prompts": "ok", "embeddings": "warn"},
            [
                "MODEL: audio (at most 1)",
                "--role decode is not possible",
                "stage decoded: --max-model-len",
                "each item may have pixel limits of its own: no",
                "not kept: 99",
            ],
        ),
        (
            _ALL,
            {"model": "ok", "prefill": "ok", "image": "ok", "prompts": "ok", "embeddings": "ok"},
            [
                "A: image (at most 3)",
                "by other workers, if there are any (--prefill), with Connector",
                "stage features; embeddings follow from grid; max_pixels 99, which requests may lower",
                "each item may have pixel limits of its own: yes",
                "kept, unless",
            ],
        ),
        (_TEXT, {"model": "ok", "prefill": "ok"}, ["A: it takes no media", "by other workers, if"]),
        (_UNKNOWN, {"model": "fail"}, ["it cannot be loaded (ValueError: no such model)"]),
        (_FLAGS, {"model": "fail"}, ["it cannot be loaded (no such flag)"]),
    ],
    ids=["neither", "both", "text", "unknown", "flags"],
)
def test_stage_and_embeddings_of_a_model_are_reported(installation, capsys, model, report, verdicts, text):
    found = model_findings(installation, capsys, report, model)
    text = [part.replace("MODEL", model) for part in text]
    assert {name: finding["verdict"] for name, finding in found.items()} == verdicts
    assert all(finding["text"].startswith(part) for finding, part in zip(found.values(), text, strict=True))
    assert all(finding["advice"] for finding in found.values() if finding["verdict"] != "ok")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["/no/such/folder"], "neither an existing folder nor"),
        (["MODEL", "--", "--max-modle-len", "5"], "did you mean --max-model-len?"),
        (["--", "--max-model-len", "5"], "medialane doctor MODEL -- FLAGS"),
    ],
)
def test_wrong_arguments_are_reported_before_any_check(capsys, model, words, reason):
    assert main(["doctor", *(word.replace("MODEL", model) for word in words)]) == 2
    shown = capsys.readouterr()
    assert reason in shown.err
    assert not shown.out


@pytest.mark.usefixtures("light")
def test_findings_are_shown_as_a_table(capsys):
    main(["doctor", "--port", "0"])
    assert "torchvision" in capsys.readouterr().out


def test_build_that_crashes_python_is_a_finding(installation):
    for name in ("torch", "av"):
        installation.library(name, CRASH)
    ((_, finding),) = doctor.check_imports()
    assert finding.verdict == doctor.check_media().verdict == "fail"


def test_private_seams_of_vllm_are_counted(light):
    finding = doctor.check_seams()
    assert (finding.verdict, finding.advice) == ("ok", "")
    assert finding.text == "vLLM 0.32.0: 64 private seams, all found"


def test_broken_vllm_seam_fails_with_its_name_and_advice(installation):
    for name in ("vllm", "torch"):
        installation.library(name, "")
    finding = doctor.check_seams()
    assert finding.verdict == "fail"
    assert "is missing: no module vllm." in finding.text
    assert "docs/upgrading-vllm.md" in finding.advice


def test_vllm_that_cannot_be_imported_is_a_finding(installation):
    installation.library("vllm", CRASH)
    assert doctor.check_seams().verdict == "fail"


def test_kinds_of_media_are_reported():
    finding = doctor.check_media()
    assert finding.verdict == "ok"
    assert finding.text.startswith("image (jpeg png ")


def test_unavailable_media_kind_is_a_warning_with_its_fix(installation):
    installation.remove("av")
    finding = doctor.check_media()
    assert finding.verdict == "warn"
    assert "video/h264" in finding.text
    assert finding.advice == "pip install av"


@pytest.mark.parametrize("missing", [[], ["use the network (seccomp is not available)"]])
def test_missing_preparer_confinement_is_a_warning(installation, missing):
    installation.stand_in("medialane.prepare.sandbox", f"def missing_here(): return {missing!r}")
    finding = doctor.check_sandbox()
    assert finding.verdict == ("warn" if missing else "ok")
    assert all(part in finding.text for part in missing)


def test_sandbox_is_tested_in_a_separate_process():
    assert all(isinstance(missing, str) for missing in doctor.probe(doctor.SANDBOX, ""))


def test_too_small_shared_memory_fails_with_advice_to_enlarge_it():
    finding = doctor.check_shared_memory(load_config({"arena-size": "900TiB"}, environ={}))
    assert finding.verdict == "fail"
    assert "--shm-size" in finding.advice
    absent = doctor.check_shared_memory(load_config({"arena-directory": "/absent"}, environ={}))
    assert absent.verdict == "fail"


@pytest.mark.parametrize(
    ("release", "verdict"), [("5.13.19-x", "warn"), ("5.14.0", "ok"), ("6.1.0", "ok"), ("odd", "ok")]
)
def test_old_kernel_is_a_warning(release, verdict):
    assert doctor.check_kernel(release).verdict == verdict


def test_each_address_of_the_gateways_to_join_is_tried(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as refusing:
        refusing.bind(("127.0.0.2", 0))
        port = listening.getsockname()[1]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)) for host in ("127.0.0.1", "127.0.0.2")]
        look_up = socket.getaddrinfo
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda host, *rest, **more: found if host == "gateways" else look_up(host, *rest, **more),
        )
        good, bad = doctor.check_gateways([TcpAddress("gateways", port)])
    assert (good.verdict, good.text) == ("ok", f"127.0.0.1:{port} accepts connections")
    assert (bad.verdict, bad.text) == ("fail", f"127.0.0.2:{port}")
    assert bad.advice.startswith("Connection refused")


def test_unknown_name_of_a_gateway_to_join_is_a_failure():
    (finding,) = doctor.check_gateways([TcpAddress("no such name", 7100)])
    assert (finding.verdict, finding.advice) == ("fail", "the name cannot be resolved: Name or service not known")
