import argparse
import json
import sys

import pytest
from own_process import unchanged_process

from medialane.cli import bench
from medialane.types.errors import StartupFailed

BENCHMARK = """
from harness import Bar, Report

ABOUT = "measures nothing"


def run(options):
    value = 1.0 if options.quick else {value}
    rows = [{{"what": "speed", "value": value}}]
    return Report("{name}", {{"figures": rows}}, [Bar("{name} speed", value, 2.0, "at least")])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with benchmarks of its own and the real harness. What it makes importable ends with the test."""
    monkeypatch.syspath_prepend(str(tmp_path))  # afterwards the path is as before
    before = set(sys.modules)
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "harness.py").symlink_to(bench.FOLDER / "harness.py")
    yield folder
    for name in set(sys.modules) - before:
        if name == "harness" or name.startswith("bench_"):
            del sys.modules[name]


def write(folder, name, value):
    (folder / f"bench_{name}.py").write_text(BENCHMARK.format(name=name, value=value))


def run(folder, *words):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser, folder)
    with unchanged_process():
        return bench.run(parser.parse_args([*map(str, words)]), folder)


def test_met_targets_succeed_and_print_the_table(folder, capsys):
    write(folder, "fast", 3.0)
    assert run(folder, "fast") == 0
    shown = capsys.readouterr().out
    assert "measures nothing" in shown
    assert "speed" in shown
    assert "ok   fast speed: 3 (at least 2)" in shown


def test_missed_target_is_a_failure(folder, capsys):
    write(folder, "slow", 1.5)
    assert run(folder, "slow") == 1
    assert "MISS slow speed: 1.5 (at least 2)" in capsys.readouterr().out


def test_all_runs_every_benchmark_and_one_missed_target_fails(folder, capsys):
    write(folder, "fast", 3.0)
    write(folder, "slow", 1.5)
    assert run(folder, "all") == 1
    assert "fast speed" in (shown := capsys.readouterr().out)
    assert "slow speed" in shown


@pytest.mark.parametrize("long", ["soak", "start"])
def test_long_benchmark_runs_only_if_named(folder, capsys, long):
    write(folder, "fast", 3.0)
    write(folder, long, 3.0)
    assert run(folder, "all") == 0
    assert long not in capsys.readouterr().out
    assert run(folder, long) == 0
    assert f"{long} speed" in capsys.readouterr().out


def test_other_checkout_is_passed_to_the_benchmark(folder, tmp_path):
    (folder / "bench_which.py").write_text(
        "from harness import Bar, Report\nABOUT = ''\n\n\ndef run(options):\n"
        "    return Report('which', {}, [Bar(str(options.other), 1.0, 0.0, 'at least')])\n"
    )
    (tmp_path / "other" / "src" / "medialane").mkdir(parents=True)
    file = tmp_path / "results.json"
    run(folder, "which", "--json", file, "--other", tmp_path / "other")
    assert json.loads(file.read_text())["bars"][0]["name"] == str(tmp_path / "other")


def test_other_folder_that_is_no_checkout_is_refused(folder, tmp_path):
    write(folder, "fast", 3.0)
    with pytest.raises(StartupFailed, match="not a checkout"):
        run(folder, "fast", "--other", tmp_path)


def test_quick_flag_is_passed_to_the_benchmark(folder):
    write(folder, "fast", 3.0)
    assert run(folder, "fast", "--quick") == 1


def test_number_of_requests_is_passed_to_the_benchmark(folder):
    text = BENCHMARK.format(name="many", value=3.0).replace("options.quick", "options.num_requests == 7")
    (folder / "bench_many.py").write_text(text)
    assert run(folder, "many", "--requests", 7) == 1
    assert run(folder, "many") == 0
    with pytest.raises(StartupFailed, match="--requests"):
        run(folder, "many", "--requests", 0)


def test_json_describes_measurement_and_machine(folder, tmp_path):
    write(folder, "fast", 3.0)
    write(folder, "slow", 1.5)
    file = tmp_path / "figures.json"
    run(folder, "all", "--json", file)
    found = json.loads(file.read_text())
    assert found["machine"]["num_cores"] >= 1
    assert "medialane" in found["versions"]
    assert isinstance(found["commit"], str)
    assert found["results"] == {
        "fast": {"figures": [{"what": "speed", "value": 3.0}]},
        "slow": {"figures": [{"what": "speed", "value": 1.5}]},
    }
    assert found["bars"] == [
        {"name": "fast speed", "value": 3.0, "limit": 2.0, "sense": "at least", "ok": True},
        {"name": "slow speed", "value": 1.5, "limit": 2.0, "sense": "at least", "ok": False},
    ]


def test_results_before_a_failure_are_kept(folder, tmp_path):
    write(folder, "fast", 3.0)
    (folder / "bench_wrong.py").write_text("ABOUT = ''\ndef run(options): raise RuntimeError('no')\n")
    file = tmp_path / "figures.json"
    with pytest.raises(RuntimeError):
        run(folder, "all", "--json", file)
    assert set(json.loads(file.read_text())["results"]) == {"fast"}


def test_unknown_name_error_lists_the_known_names(folder):
    write(folder, "fast", 3.0)
    with pytest.raises(StartupFailed, match="no benchmark 'faster'; there are fast and all"):
        run(folder, "faster")


def test_installation_without_checkout_is_one_clear_error(tmp_path):
    with pytest.raises(StartupFailed, match="from a checkout") as failed:
        run(tmp_path / "none", "fast")
    assert "\n" not in failed.value.message


def test_json_path_in_a_missing_folder_fails_before_running(folder, tmp_path, capsys):
    write(folder, "fast", 3.0)
    with pytest.raises(StartupFailed, match="there is no folder"):
        run(folder, "fast", "--json", tmp_path / "none" / "figures.json")
    assert not capsys.readouterr().out


def test_arguments_match_the_benchmarks_of_this_checkout(folder):
    write(folder, "fast", 3.0)
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser, folder)
    assert "fast, all" in parser.format_help()


def test_checkout_has_the_benchmarks_named_in_the_readme():
    assert {"handover", "prepare", "loop"} <= {path.stem.removeprefix("bench_") for path in bench.FOLDER.iterdir()}
