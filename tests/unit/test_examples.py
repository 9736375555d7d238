"""Commands, settings and data of all pages: bash runs what they say to type, with a recorder instead of the programs,
and each command is then checked by what would read it. The commands of the first ten minutes are also run as they
are, by tests/e2e/test_e2e_documentation.py.
"""

import ast
import importlib
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import trustme
import yaml

from certificates import tls_settings
from medialane.cli import COMMANDS, parse_words, serve
from medialane.cluster import Hardware, check_join, check_join_listen, flag_table, model_groups
from medialane.cluster.ray import Nodes, remote, with_join_addresses, worker_specs
from medialane.config import load_config, load_models
from medialane.gateway.admission.tenants import read_keys

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
_SECRET = "0123456789abcdef" * 2

PAGES = [page for folder in ("examples", "deploy", "docs") for page in (ROOT / folder).rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_folders_are_made_before_files_are_installed_into_them(page):
    made = set()
    for line in page.read_text().splitlines():
        if line.startswith(("mkdir -p ", "install -D ", "install -d ")):
            target = Path(re.search(r" (/(?!dev/)\S+)", line)[1])
            made |= {target, target.parent}
        if line.startswith("install -m") and "/systemd/system" not in line:  # with -D, install makes the folder
            target = re.search(r" (/(?!dev/)\S+)", line)[1]
            assert {Path(target), Path(target).parent} & made, line


def test_models_of_the_example_are_placed_on_four_gpus():
    _, tables = load_models(
        file=str(EXAMPLES / "models" / "models.toml"),
        environ={},
        sections=("cluster",),
        rules=model_groups.TABLES,
    )
    groups = [model_groups.group_of(table, ()) for table in tables]
    assert [group.served_names for group in groups] == [("vision",), ("Qwen/Qwen3-8B",), ("speech",), ("embed",)]
    assert model_groups.adapters(groups[1]) == ("support",)
    gpus = model_groups.split_gpus(groups, Hardware(("0", "1", "2", "3"), 16))
    assert gpus == [("0", "1"), ("2",), ("3",), ("3",)]


def test_settings_for_ray_are_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "vllm_is_for_cpu", lambda: False)
    text = (EXAMPLES / "ray" / "serve.toml").read_text()
    secret = tmp_path / "secret"
    secret.write_text(_SECRET)
    secret.chmod(0o600)
    text = text.replace("/etc/medialane/rpc-secret", str(secret))
    for name, path in tls_settings(tmp_path / "tls", trustme.CA()).items():
        text = text.replace(f"/etc/medialane/tls/{name.removeprefix('tls_')}.pem", path)
    (tmp_path / "serve.toml").write_text(text)
    config = load_config(
        file=str(tmp_path / "serve.toml"), environ={}, sections=("cluster", "gateway", "rpc", "worker")
    )
    assert config.cluster.gateway_nodes == "each"
    found = with_join_addresses(config, "10.0.0.1", ["10.0.0.2"])
    check_join(found)
    nowhere = msgspec.structs.replace(found, gateway=msgspec.structs.replace(found.gateway, join_listen="127.0.0.1:0"))
    check_join_listen(nowhere)
    nodes = Nodes("10.0.0.1", ["10.0.0.2"], "unix:/store.sock")
    specs = worker_specs(found, "m", (), nodes, has_gpus=True, folder="abc")
    assert [(spec.num_gpus, spec.num_cpus) for spec in specs] == [(1, 4)] * 4
    assert {spec.environ["MEDIALANE_JOIN"] for spec in specs} == {"10.0.0.1:7100,10.0.0.2:7100"}


#: The programs of the pages' commands, and what else tests them.
PROGRAMS = {
    "medialane": "parsed here; tests of each command",
    "vllm": "test_back_to_vllm.py compares its flags",
    "make": "its targets exist",
    "curl": "its paths are endpoints",
    "python": "its scripts exist",
    "python3": "makes an environment, prints JSON",
    "pip": "its files exist; test_startup_wheels.py installs what is built",
    "base64 cut grep mkdir mv openssl sha256sum": "the system's",
    "docker": "not run, needs a daemon: test_charts.py lints the Dockerfile and checks compose.yaml",
    "helm kubectl": "not run, needs a cluster: test_charts.py renders the chart and validates the manifests",
    "ray": "not run, as it starts daemons: tests/e2e/test_e2e_ray.py has a cluster of its own",
    "systemctl useradd install runuser chgrp": "not run, as they change the machine: deploy/try boots one",
    "rsync": "not run, needs other hosts",
}
#: Our commands on pages: None for those that a test runs as they are, otherwise why not.
MEDIALANE = {
    "--version": None,
    "certs": None,
    "doctor": "half a minute: make release-check, tests of the command",
    **dict.fromkeys(("bench", "check", "compare", "demo"), "minutes: their own tests, make demo, make bench"),
    **dict.fromkeys(("gateway", "render", "serve", "store", "worker"), "servers with a model: tests/e2e, deploy/try"),
    **dict.fromkeys(("status", "workers"), "ask servers: tests/e2e"),
}
_KNOWN = {name for names in PROGRAMS for name in names.split()}
#: Commands that are not there are recorded: all of them, since there is no PATH. One write each, for both sides of a
#: pipe write at once: bash flushes at a newline, so that there is none.
_RECORDER = """
PATH=/nonexistent LOG=$PWD/.recorded
command_not_found_handle() { printf '%s\\x1f' "${@//$'\\n'/$'\\x1d'}" $'\\x1e' >> "$LOG"; }
cd() { :; }
"""
#: Where a script writes, and what it would load into the shell.
_ELSEWHERE = ((r"/etc/medialane", "."), (r"[\w./]*/bin/(pip|medialane)\b", r"\1"), (r"\. \S+/bin/activate", "true"))
ALL_PAGES = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
each_page = pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")


def blocks(page, *languages):
    """The fenced blocks of a page in these languages; '' for those without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [block for language, block in found if language in languages]


def is_script(block, page):
    line = next(line for line in block.removeprefix("$ ").splitlines() if not line.startswith("#"))
    first = re.split(r"[ (]", line, maxsplit=1)[0].rpartition("/")[2]
    is_function = bool(first) and f"\n{first}() {{" in page.read_text()
    return first in _KNOWN | {"cd", "export", "umask"} or is_function or bool(re.match(r"\w+=\S|\(umask", line))


def script(page):
    """What a page says to type, without what it prints: lines of JSON, and behind a prompt all that is not indented."""
    lines = []
    for block in [block for block in blocks(page, "", "console") if is_script(block, page)]:
        prompted = block.startswith("$ ")
        shown = [line for line in block.splitlines() if not prompted or line.startswith(("$ ", "    "))]
        lines += [line.removeprefix("$ ") for line in shown if not line.startswith('{"')]
    text = "\n".join(lines)
    for pattern, place in _ELSEWHERE:
        text = re.sub(pattern, place, text)
    return text


def commands(page, folder):
    """The commands of a page, as bash would call them: lists of words."""
    done = subprocess.run(
        ["bash", "-c", f"{_RECORDER}{script(page)}\n"], cwd=folder, capture_output=True, text=True, timeout=10
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    recorded = folder / ".recorded"
    words = recorded.read_text().replace("\x1d", "\n").split("\x1f") if recorded.exists() else []
    ends = [index for index, word in enumerate(words) if word == "\x1e"]
    return [words[begin + 1 : end] for begin, end in pairwise([-1, *ends])]


def parsed(words):
    """A command of ours and its settings, by our parser."""
    name, *rest = words[1:]
    module = importlib.import_module(f"medialane.cli.{COMMANDS[name].module}")
    return parse_words(name, COMMANDS[name], module.add_arguments, rest)


def endpoints():
    rows = re.findall(r"^\| (`/.+?) \| (?:vLLM|medialane) \|", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    return {path for row in rows for path in re.findall(r"`(/[^`]*)`", row)}


def check_medialane(words):
    if words[1] != "--version":
        unknown = {word.partition("=")[0] for word in parsed(words).vllm_args if word.startswith("--")}
        assert unknown <= flag_table()["flags"].keys()


def check_make(words):
    assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def check_curl(words):
    (url,) = [word for word in words if re.match(r"(http://)?[\w.]+(:\d+)?/", word)]
    assert re.sub(r"\?.*", "", "/" + url.removeprefix("http://").partition("/")[2]) in endpoints()
    bodies = [words[index + 1] for index, word in enumerate(words) if word == "-d"]
    assert all(body.startswith("@") or msgspec.json.decode(body) for body in bodies)


def check_python(words):
    assert list(ROOT.rglob(words[1]))


CHECKS = {"medialane": check_medialane, "make": check_make, "curl": check_curl, "python": check_python}


@each_page
def test_commands_of_a_page(page, tmp_path):
    for words in commands(page, tmp_path):
        program = words[0].rpartition("/")[2]
        assert program in _KNOWN, f"{words}: what tests it? See PROGRAMS"
        CHECKS.get(program, bool)(words)
        files = [
            word for word in words if re.match(r"(\./)?(benchmarks|deploy|docs|examples|packages|requirements)/", word)
        ]
        assert all(list(ROOT.glob(path.removeprefix("./"))) for path in files), words


@each_page
def test_data_of_a_page_can_be_read(page):
    for block in blocks(page, "json"):
        for text in block.splitlines() if "\n{" in block else [block]:
            msgspec.json.decode(text.replace("...", "0") if "[..." in text else text)
    for block in blocks(page, "yaml"):
        assert list(yaml.safe_load_all(block))
    for block in blocks(page, "python"):
        compile(block, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_files_of_settings_of_the_pages_are_ours(tmp_path):
    found = [block for page in ALL_PAGES for block in blocks(page, "toml")]
    assert found
    for text in found:
        path = tmp_path / "settings.toml"
        path.write_text(re.sub(r"/etc/medialane|/var/log/medialane", str(tmp_path), text))
        load_models(file=str(path), environ={}, sections=serve.SECTIONS, rules=model_groups.TABLES)


def test_guide_for_one_host_makes_the_files_of_its_settings(tmp_path):
    page = ROOT / "docs" / "guides" / "one-host.md"
    secrets = script(page).partition("chgrp")[0]
    subprocess.run(["bash", "-euo", "pipefail", "-c", secrets], cwd=tmp_path, check=True, timeout=10)
    (tenant,) = read_keys(str(tmp_path / "keys")).values()
    assert tenant.concurrency == 200
    for name in ("keys", "admin-key"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o640


def test_commands_that_need_no_model_and_no_server_do_what_they_say(tmp_path):
    run = set()
    for number, page in enumerate(ALL_PAGES):
        folder = tmp_path / str(number)
        folder.mkdir()
        for _, command, *words in (
            each for each in commands(page, folder) if each[0].rpartition("/")[2] == "medialane"
        ):
            assert command in MEDIALANE
            if MEDIALANE[command] is None:
                run.add(command)
                again = ["--force"] if command == "certs" else []  # a page may say it twice
                argv = [sys.executable, "-c", "from medialane.cli.main import main; main()", command, *words, *again]
                done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=19)
                assert done.returncode == 0, done.stderr
    assert run == {command for command, why in MEDIALANE.items() if why is None}


def test_commands_for_ray_are_ours(tmp_path):
    found = commands(EXAMPLES / "ray" / "README.md", tmp_path)
    certs, serve, _status = [parsed(words) for words in found if words[0] == "medialane"]
    assert certs.hosts == ["10.0.0.1", "10.0.0.2"]
    assert serve.config == "serve.toml"
