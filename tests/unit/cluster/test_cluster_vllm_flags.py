import pytest

from medialane.cluster.vllm_flags import flag_value, gpus_per_worker, has_flag
from medialane.core.errors import StartupFailed


@pytest.mark.parametrize(
    ("args", "value"),
    [
        (["--max-model-len", "8"], "8"),
        (["--max-model-len=8"], "8"),
        (["--max_model_len", "8"], "8"),
        (["--max-model-len", "8", "--max-model-len=9"], "9"),
        (["--max-model-len"], None),
        (["--other", "8"], None),
    ],
)
def test_value_is_found_in_every_flag_syntax(args, value):
    assert flag_value(args, "--max-model-len") == value


def test_flag_without_a_value_is_detected():
    assert has_flag(["--enforce_eager"], "--enforce-eager")
    assert not has_flag(["--enforce-eager-not"], "--enforce-eager")


@pytest.mark.parametrize(
    ("args", "number"),
    [
        ([], 1),
        (["-tp", "4"], 4),
        (["--tensor-parallel-size=2", "-pp", "2"], 4),
        (["-tp", "2", "--data-parallel-size", "3"], 6),
        (["--data-parallel-size", "8", "--data-parallel-size-local", "2"], 2),
    ],
)
def test_gpus_of_a_worker_are_counted(args, number):
    assert gpus_per_worker(args) == number


def test_non_numeric_size_is_rejected_by_flag():
    with pytest.raises(StartupFailed, match="--tensor-parallel-size two"):
        gpus_per_worker(["-tp", "two"])
