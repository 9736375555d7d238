import json
import socket

import pytest

from medialane.cli import doctor, main
from medialane.config import load_config
from medialane.wire import TcpAddress

IMPORTS = '{"torch": [true, "2.13.0"], "torchvision": [false, "RuntimeError: operator does not exist"]}'


@pytest.fixture
def light(monkeypatch):
    """Replaces the processes that load libraries by immediate results."""
    monkeypatch.setattr(doctor, "IMPORTS", f"print({IMPORTS!r})")
    monkeypatch.setattr(doctor, "KINDS", """print('["image (jpeg png)", []]')""")
    monkeypatch.setattr(doctor, "SANDBOX", "print('[]')")
    monkeypatch.setattr(doctor, "SEAMS", """print('["vLLM 0.32.0: 64 private seams, all found", true]')""")


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


def model_findings(monkeypatch, capsys, script, model):
    monkeypatch.setattr(doctor, "MODEL", script)
    main(["doctor", model, "--json", "--port", "0", "--", "--max-model-len", "99"])
    found = {f["name"]: f for f in json.loads(capsys.readouterr().out)}
    return {name: found[name] for name in ("model", "image", "audio", "prompts", "embeddings") if name in found}


_ALL = """
import json
image = {"limit": 3, "stage": "features", "why_not_features": "", "max_pixels": 99, "counted_by": "grid",
         "is_predicted": True}
media = {"modalities": {"image": image}, "accepts_item_options": True, "merge_size": 2, "predicts_image_tokens": False}
print(json.dumps({"architecture": "A", "media": media, "no_embeddings": ""}))
"""
_TEXT = """print('{"architecture": "A", "media": null, "no_embeddings": ""}')"""

#: Takes the name of the model as the architecture, and vLLM's flags as the reasons.
_REASONS = """
import json, sys
model, flags = json.loads(sys.argv[1])
one = {"limit": 1, "stage": "decoded", "why_not_features": flags[0], "max_pixels": None, "counted_by": "",
       "is_predicted": False}
media = {"modalities": {"audio": one}, "accepts_item_options": False, "merge_size": 1, "predicts_image_tokens": False}
print(json.dumps({"architecture": model, "media": media, "no_embeddings": flags[1]}))
"""


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(
    ("script", "verdicts", "text"),
    [
        (
            _REASONS,
            {"model": "ok", "audio": "warn", "prompts": "ok", "embeddings": "warn"},
            [
                "MODEL: audio (at most 1)",
                "stage decoded: --max-model-len",
                "each item may have pixel limits of its own: no",
                "not kept: 99",
            ],
        ),
        (
            _ALL,
            {"model": "ok", "image": "ok", "prompts": "ok", "embeddings": "ok"},
            [
                "A: image (at most 3)",
                "stage features; embeddings follow from grid; max_pixels 99, which requests may lower",
                "each item may have pixel limits of its own: yes",
                "kept, unless",
            ],
        ),
        (_TEXT, {"model": "ok"}, ["A: it takes no media"]),
        ("raise ValueError('no such model')", {"model": "fail"}, ["it cannot be loaded (ValueError: no such model)"]),
        (
            "from medialane.types.errors import StartupFailed; raise StartupFailed('no such flag')",
            {"model": "fail"},
            ["it cannot be loaded (no such flag)"],
        ),
    ],
    ids=["neither", "both", "text", "unknown", "flags"],
)
def test_stage_and_embeddings_of_a_model_are_reported(monkeypatch, capsys, model, script, verdicts, text):
    found = model_findings(monkeypatch, capsys, script, model)
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
def test_wrong_arguments_are_reported_before_any_check(monkeypatch, capsys, model, words, reason):
    monkeypatch.setattr(doctor, "run_checks", None)
    assert main(["doctor", *(word.replace("MODEL", model) for word in words)]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.usefixtures("light")
def test_findings_are_shown_as_a_table(capsys):
    main(["doctor", "--port", "0"])
    assert "torchvision" in capsys.readouterr().out


def test_build_that_crashes_python_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "IMPORTS", "import os; os.abort()")
    monkeypatch.setattr(doctor, "KINDS", "import os; os.abort()")
    ((_, finding),) = doctor.check_imports()
    assert finding.verdict == doctor.check_media().verdict == "fail"


def test_private_seams_of_vllm_are_counted(light):
    finding = doctor.check_seams()
    assert (finding.verdict, finding.advice) == ("ok", "")
    assert finding.text == "vLLM 0.32.0: 64 private seams, all found"


def test_broken_vllm_seam_fails_with_its_name_and_advice(monkeypatch):
    broken = """
import dataclasses
from medialane.vllm_bridge.seams import probe as module, table
seam = table.Seam("json:no_such_name", "read")
module.GROUPS = (dataclasses.replace(table.GROUPS[0], seams=(seam,)),)
"""
    monkeypatch.setattr(doctor, "SEAMS", broken + doctor.SEAMS)
    finding = doctor.check_seams()
    assert finding.verdict == "fail"
    assert "json:no_such_name" in finding.text
    assert "docs/upgrading-vllm.md" in finding.advice


def test_vllm_that_cannot_be_imported_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "SEAMS", "import os; os.abort()")
    assert doctor.check_seams().verdict == "fail"


def test_kinds_of_media_are_reported():
    finding = doctor.check_media()
    assert finding.verdict == "ok"
    assert finding.text.startswith("image (jpeg png ")


def test_unavailable_media_kind_is_a_warning_with_its_fix(monkeypatch):
    blocked = "import sys; sys.modules['av'] = None\n"
    monkeypatch.setattr(doctor, "KINDS", blocked + doctor.KINDS)
    finding = doctor.check_media()
    assert finding.verdict == "warn"
    assert "video/h264" in finding.text
    assert finding.advice == "pip install av"


@pytest.mark.parametrize("missing", [[], ["use the network (seccomp is not available)"]])
def test_missing_preparer_confinement_is_a_warning(monkeypatch, missing):
    monkeypatch.setattr(doctor, "SANDBOX", f"import json; print(json.dumps({missing!r}))")
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


def test_unknown_name_of_a_gateway_to_join_is_a_failure(monkeypatch):
    def unknown(*_args, **_options):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    (finding,) = doctor.check_gateways([TcpAddress("gateways", 7100)])
    assert (finding.verdict, finding.advice) == ("fail", "the name cannot be resolved: Name or service not known")
