import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import medialane
from medialane import __version__
from medialane.cli import COMMANDS, ERROR_PREFIX, main
from medialane.observability import REPORTED_ERROR
from medialane.types.errors import StartupFailed

HEAVY = {"torch", "vllm", "transformers", "aiohttp", "rich", "numpy", "medialane.config"}


class FakeCommand:
    """A subcommand's module that remembers what it was given."""

    def __init__(self, error=None):
        self.args = None
        self.error = error

    def add_arguments(self, parser):
        parser.add_argument("model")
        parser.add_argument("--workers")

    def run(self, args):
        self.args = args
        if self.error:
            raise self.error
        return 5


@pytest.fixture
def install(monkeypatch):
    """Puts a module in the place of that of each command."""

    def put(command):
        for known in COMMANDS.values():
            monkeypatch.setitem(sys.modules, f"medialane.cli.{known.module}", command)
        return command

    return put


def test_help_imports_nothing_heavy_and_is_fast():
    script = (
        "import sys, json\n"
        "from medialane.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds = time.monotonic() - started
    *shown, modules = done.stdout.splitlines()
    assert not HEAVY & set(json.loads(modules))
    assert all(any(name in line for line in shown) for name, command in COMMANDS.items() if command.help)
    assert seconds < 2  # 0.05 s on an idle machine; the list of modules is the sharper half of this test


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert __version__ in capsys.readouterr().out


def test_no_command_shows_help_and_unknown_command_is_an_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    with pytest.raises(SystemExit) as ended:
        main(["sevre"])
    assert ended.value.code == 2
    assert "sevre" in capsys.readouterr().err


def test_arguments_after_the_double_dash_are_for_vllm(install):
    command = install(FakeCommand())
    assert main(["serve", "m", "--workers", "2", "--", "--max-model-len", "8", "--", "x"]) == 5
    assert command.args.model == "m"
    assert command.args.workers == "2"
    assert command.args.vllm_args == ["--max-model-len", "8", "--", "x"]


def test_misplaced_vllm_flag_error_says_where_it_belongs(install, capsys):
    install(FakeCommand())
    with pytest.raises(SystemExit) as ended:
        main(["serve", "m", "--max-model-len", "8"])
    assert ended.value.code == 2
    assert "--max-model-len" in (err := capsys.readouterr().err)
    assert "after a lone `--`" in err


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--worker", "--workers"),
        ("--allow_media_networks=10.0.0.0/8", "--allow-media-network"),
        ("--Admin-Key-Fil", "--admin-key-file"),
        ("--cpus-per-workers", "--cpus-per-worker"),  # among the flags that --help-all shows
        ("--max-model-len", None),
        ("--nothing-of-the-kind", None),
    ],
)
def test_misspelt_flag_is_named_with_the_one_that_is_meant(word, meant, capsys):
    with pytest.raises(SystemExit):
        main(["serve", "m", word])
    err = capsys.readouterr().err
    assert word in err
    assert (f"did you mean {meant}?" in err) if meant else ("did you mean" not in err)


def test_help_of_serve_begins_with_what_a_first_server_needs(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    flags = re.findall(r"^  (--[\w-]+)", capsys.readouterr().out.partition("settings:")[2], re.MULTILINE)
    first = ["--keys", "--admin-key-file", "--allow-media-network", "--drain-timeout"]
    later = ["--cpus-per-worker", "--encoder-gpu-share", "--ray", "--stage"]
    assert max(map(flags.index, first)) < min(map(flags.index, later))


def test_command_without_vllm_flags_rejects_them(install, capsys):
    install(FakeCommand())
    with pytest.raises(SystemExit):
        main(["status", "m", "--", "--enforce-eager"])
    assert "takes no vLLM flags" in capsys.readouterr().err


def test_abbreviated_flags_are_rejected(install):
    install(FakeCommand())
    with pytest.raises(SystemExit):
        main(["serve", "m", "--work", "2"])


def test_failed_start_is_one_line_for_the_supervisor(install, capsys):
    install(FakeCommand(StartupFailed("port 8000 is taken")))
    assert main(["serve", "m"]) == 2
    assert capsys.readouterr().err == "medialane: error: port 8000 is taken\n"
    assert ERROR_PREFIX == REPORTED_ERROR


def test_interrupt_exits_with_the_shell_status(install):
    install(FakeCommand(KeyboardInterrupt()))
    assert main(["serve", "m"]) == 130


def test_absent_package_is_named_in_one_line(install, capsys):
    install(FakeCommand(ModuleNotFoundError("No module named 'no_such_package.part'", name="no_such_package.part")))
    assert main(["demo", "m"]) == 2
    assert capsys.readouterr().err == (
        "medialane: error: `medialane demo` needs the package no_such_package, which is not installed: "
        "install medialane with its dependencies (see README.md)\n"
    )


def test_module_that_an_installed_package_lacks_is_not_reported_as_a_missing_package(install):
    install(FakeCommand(ModuleNotFoundError("No module named 'json.part'", name="json.part")))
    with pytest.raises(ModuleNotFoundError):
        main(["demo", "m"])


#: As `pip install --no-deps` leaves it: the standard library and our package.
NO_DEPS = "import sys; sys.path.insert(0, sys.argv.pop(1)); from medialane.cli.main import main; sys.exit(main())"
SRC = str(Path(medialane.__file__).parents[1])


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "bench"])
def test_every_command_without_dependencies_names_one_and_the_remedy(command):
    done = subprocess.run(
        [sys.executable, "-S", "-c", NO_DEPS, SRC, command, "m"],
        capture_output=True,
        text=True,
        check=False,
        env={},
        timeout=20,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    what = rf"`medialane {command}` needs the package \w+, which is not installed"
    assert re.fullmatch(
        rf"medialane: error: {what}: install medialane with its dependencies \(see README.md\)\n", done.stderr
    )


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_need_no_dependencies(flag):
    done = subprocess.run(
        [sys.executable, "-S", "-c", NO_DEPS, SRC, flag], capture_output=True, text=True, check=True, env={}, timeout=20
    )
    assert "medialane" in done.stdout
