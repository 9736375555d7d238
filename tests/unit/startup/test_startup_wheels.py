"""What the distributions contain and require: on GPUs none of our code runs in every Python process, and pip is asked
for nothing that is on no index."""

import email
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
CPU_TORCH = ROOT / "packages" / "medialane-cpu-torch"
BUILD = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def build(project, hook, folder):
    """Built by pip's build backend, without downloads."""
    pytest.importorskip("hatchling", reason="not in this environment yet: make venv")
    words = [sys.executable, "-c", BUILD, hook, str(folder)]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, check=True, timeout=15)
    return folder / done.stdout.splitlines()[-1]


def names_in_wheel(project, folder):
    with ZipFile(build(project, "build_wheel", folder)) as wheel:
        return wheel.namelist()


def settings(project):
    return tomllib.loads((project / "pyproject.toml").read_text())


def test_medialane_wheel_contains_only_its_package(tmp_path):
    tops = {name.split("/")[0] for name in names_in_wheel(ROOT, tmp_path)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"medialane"}


def test_hook_wheel_contains_the_hook(tmp_path):
    names = names_in_wheel(CPU_TORCH, tmp_path)
    assert {"medialane-cpu-torch.pth", "medialane_cpu_torch/__init__.py"} <= set(names)
    assert sum(name.endswith(".pth") for name in names) == 1


def test_medialane_wheel_is_configured_to_contain_only_the_package():
    wheel = settings(ROOT)["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert (wheel.keys(), wheel["packages"]) == ({"core-metadata-version", "packages"}, ["src/medialane"])
    assert not list((ROOT / "src").rglob("*.pth"))


def test_sdist_builds_a_wheel_and_has_nothing_of_our_ci(tmp_path):
    with tarfile.open(build(ROOT, "build_sdist", tmp_path)) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        assert not {name for name in names if name.startswith((".ci", ".git/", ".venv"))}
        assert {"Makefile", "requirements/cpu.txt", "packages/medialane-cpu-torch/pyproject.toml"} <= names
        sdist.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert "medialane/cli/main.py" in names_in_wheel(unpacked, tmp_path)


def metadata(folder, repository):
    """The metadata of a wheel that is built with the URL `repository` in pyproject.toml."""
    project = folder / "project"
    project.mkdir()
    for name in ("src", "README.md", "LICENSE", "hatch_build.py"):
        (project / name).symlink_to(ROOT / name)
    text = (ROOT / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(
        re.sub(r'^repository = ".*"', f'repository = "{repository}"', text, flags=re.M)
    )
    with ZipFile(build(project, "build_wheel", folder)) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(wheel.read(name))


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_metadata_name_the_pages_of_the_repository(tmp_path):
    found = metadata(tmp_path, "https://example.org/medialane")
    urls = dict(entry.split(", ") for entry in found.get_all("Project-URL"))
    assert urls["Repository"] == "https://example.org/medialane"
    for name in ("Documentation", "Changelog"):
        path = urls[name].removeprefix("https://example.org/medialane/blob/main/")
        assert (ROOT / path).exists()
    assert "https://example.org/medialane/blob/main/docs/api.md" in links(found.get_payload())
    assert all(link.startswith("https://") for link in links(found.get_payload()))


def test_description_has_no_broken_links_without_a_repository(tmp_path):
    found = metadata(tmp_path, "")
    assert found.get_all("Project-URL") is None
    assert "| API, " in found.get_payload()
    assert all(link.startswith("https://") for link in links(found.get_payload()))


def required():
    """All requirements of medialane, with the extra of each."""
    project = settings(ROOT)["project"]
    yield from ((None, Requirement(each)) for each in project["dependencies"])
    for extra, wanted in project["optional-dependencies"].items():
        yield from ((extra, Requirement(each)) for each in wanted)


def test_nothing_of_ours_is_required_by_name():
    """We hold no name on any index: whoever registered it there would run code on our users' machines."""
    assert not [wanted.name for _, wanted in required() if "medialane" in wanted.name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_commands_ask_pip_for_nothing_of_ours_by_name(page):
    for command in re.findall(r"pip install ([^`\n]*)", page.read_text()):
        ours = re.findall(r"[\w./\"'-]*medialane[^ ]*(?: @ git\+URL[^ ]*)?", command.partition("#")[0])
        assert all(each.startswith("./packages/") or " @ git+URL" in each for each in ours), command


def test_messages_ask_pip_for_nothing_of_ours_by_name():
    named = [path.name for path in SOURCES if re.search(r"pip install ['\"]?medialane|medialane\[", path.read_text())]
    assert not named


def locked(name):
    """Return versions (several where they depend on the platform) and number of hashes by name."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    found = {}
    for entry in re.split(r"\n(?=\S)", text):
        if not entry.startswith("#"):
            distribution, version = re.match(r"([a-z0-9.-]+)==(\S+)", entry).groups()
            found.setdefault(distribution, {})[version] = entry.count("--hash=sha256:")
    return found


@pytest.mark.parametrize("name", ["cpu", "vllm", "tests", "uv", "peers"])
def test_every_locked_version_has_a_hash(name):
    found = locked(name)
    assert found
    assert not [each for each, versions in found.items() if not all(versions.values())]
    assert not [each for each in found if "medialane" in each]


@pytest.mark.parametrize("extra", ["cpu", "vllm"])
def test_locked_versions_are_those_that_pyproject_asks_for(extra):
    found = locked("tests") | locked(extra)
    for asking, wanted in required():
        if asking in {None, extra, "nixl", "ray", "dev"} and (extra, wanted.name) != ("cpu", "torch"):
            assert all(wanted.specifier.contains(version) for version in found[wanted.name]), f"{wanted}: make lock"


def test_a_cpu_gets_nothing_for_gpus():
    assert not [
        name for name in locked("cpu") | locked("tests") if re.match("triton|nvidia-|cuda-|torch$|torchcodec", name)
    ]
    assert [name for name in locked("tests") if name.startswith("nixl-cu")] == ["nixl-cu13"]


def installs(extra, target):
    """The installer's arguments, as make would call it."""
    words = ["make", "--dry-run", "--always-make", f"EXTRA={extra}", "TORCH_INDEX=https://torch.example", target]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=15)
    return re.findall(r"\S+ requirements/install\.py .*?(?= 2>&1)", done.stdout)


@pytest.mark.parametrize(
    ("extra", "last"), [("cpu", ["-e", ".", "./packages/medialane-cpu-torch"]), ("vllm", ["-e", "."])]
)
def test_make_demo_installs_locked_files_and_ours_from_their_folders(extra, last):
    calls = [call.split() for call in installs(extra, "demo")]
    assert calls[-2][-3:] == [":all:", "-r", f"requirements/{extra}.txt"]
    assert "--require-hashes" in calls[-2]
    assert "--no-build-isolation" in calls[-1]
    assert calls[-1][calls[-1].index("-e") :] == last
    # A local version, which PyPI does not accept: the most likely to be missing. PyTorch's index is asked after pip's.
    assert [call[2:] for call in calls[:-2]] == (
        [["torch==2.13.0+cpu"], ["--index-url", "https://torch.example", "torch==2.13.0+cpu"]] if extra == "cpu" else []
    )


def test_make_test_adds_what_tests_need():
    added = [call for call in installs("cpu", "test") if call not in installs("cpu", "demo")]
    assert len(added) == 1
    assert "--require-hashes" in added[0]
    assert added[0].endswith("-r requirements/tests.txt")
