"""What builds and tries the images and units (deploy/images, deploy/try), and the table that it has written."""

import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MOST_GB = 3.0


@pytest.fixture(scope="module")
def steps():
    loader = importlib.machinery.SourceFileLoader("deploy_try", str(DEPLOY / "try"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("deploy_try", loader))
    loader.exec_module(module)
    return module.STEPS


def rows():
    text = (ROOT / "docs" / "deployment.md").read_text()
    table = text.partition("<!-- Written by deploy/try -->")[2].partition("<!-- End of deploy/try -->")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    return {what: (result, remark) for what, result, remark in cells[2:]}


def test_table_has_each_step_with_its_reason(steps):
    found = rows()
    assert list(found) == [what for what, _ in steps.values()]
    assert {result for result, _ in found.values()} <= {"ok", "failed", "not run"}
    assert all(remark for _, remark in found.values()), "a step that failed or did not run has a reason"


def test_image_without_a_gpu_is_small_enough():
    (text,) = [remark for what, (_, remark) in rows().items() if what.startswith("the image")]
    assert float(re.match(r"([\d.]+) GB", text)[1]) <= MOST_GB
    assert f"MOST_MB={MOST_GB * 1000:.0f} " in (DEPLOY / "images" / "build").read_text()


def components(lock):
    words = [sys.executable, str(DEPLOY / "images" / "sbom.py"), str(lock)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def test_bill_of_materials_names_what_is_installed_with_the_locks_hashes(tmp_path):
    lock = ROOT / "requirements" / "tests.txt"
    found = {each["name"]: each for each in json.loads(components(lock).stdout)["components"]}
    assert found["msgspec"]["purl"].startswith("pkg:pypi/msgspec@")
    assert found["ruff"]["properties"]
    other = tmp_path / "lock.txt"
    other.write_text("msgspec==0.0.1 \\\n    --hash=sha256:0\n")
    assert "which" in components(other).stderr
