import re

import pytest

from medialane.cluster import (
    SECRET_FLAGS,
    engine_flags,
    flag_table,
    flag_value,
    gpus_per_worker,
    has_flag,
    processor_flags,
    take_secrets,
    untraced_flags,
    warm_flags,
    with_config_file,
)
from medialane.types.errors import StartupFailed


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


@pytest.mark.parametrize(
    ("args", "taken", "rest"),
    [
        (["--api-key", "a", "b", "--seed", "-1"], {"--api-key": ["a", "b"]}, ["--seed", "-1"]),
        (["--api_key=a", "--enforce-eager"], {"--api-key": ["a"]}, ["--enforce-eager"]),
        (["--api-k", "a"], {"--api-key": ["a"]}, []),
        (["--api-key", "a", "--api-key", "b"], {"--api-key": ["b"]}, []),
        (["--hf-token=h", "--api-key", "-5"], {"--hf-token": ["h"], "--api-key": ["-5"]}, []),
        (["--hf_token", "h", "-tp", "2"], {"--hf-token": ["h"]}, ["-tp", "2"]),
        (["--hf-token", "--seed=1"], {}, ["--hf-token", "--seed=1"]),
        (["--served-model-name", "a", "b"], {}, ["--served-model-name", "a", "b"]),
    ],
)
def test_secrets_are_taken_out_in_every_spelling(args, taken, rest):
    assert take_secrets(args) == (rest, taken)


def test_engine_gets_no_flag_of_the_http_server():
    args = ["--chat-template", "-", "--max-model-len", "8", "--ssl_keyfile=k", "--no-log-error-stack", "--api-ke=x"]
    assert engine_flags([*args, "--middleware", "m", "-tp", "2", "--hf-overrides.a.b", "1", "--hf-token"]) == [
        *("--max-model-len", "8", "-tp", "2", "--hf-overrides.a.b", "1", "--hf-token"),
    ]


def test_processor_gets_the_flags_of_the_model_and_its_media():
    args = ["--hf-token", "--hf-token=x", "--api-key", "k", "--seed=1", "--kv-transfer-config", "{}", "-tp", "2"]
    assert processor_flags([*args, "--limit-mm-per-prompt.image", "2", "--of-a-plugin", "x"]) == [
        *("--seed=1", "--limit-mm-per-prompt.image", "2", "--of-a-plugin", "x")
    ]


def test_warm_process_gets_no_flag_that_may_have_a_password():
    args = ["--kv-transfer-config", "{}", "--seed=1", "--kv_transfer_config.kv_connector_extra_config.password=x"]
    assert warm_flags([*args, "--otlp-traces-endpoint=http://u:p@h", "--tool-call-parser", "hermes"]) == [
        *("--seed=1", "--tool-call-parser", "hermes")
    ]


def test_front_end_of_a_gateway_gets_no_flag_about_vllms_spans():
    args = ["--seed=1", "--otlp-traces-endpoint", "http://h:4317", "--collect-detailed-traces=all"]
    assert untraced_flags(args) == warm_flags(args) == ["--seed=1"]


#: Flags whose names have such a word, and no secret as value: numbers of tokens, and names of files.
NO_SECRETS = (
    *("tokens", "token-ids", "token-threshold", "tokens-details", "threshold-adaptive", "allow-credentials", "keyfile"),
    *("tokenizer", "skip-tokenizer-init", "tokenizer-revision", "tokenizer-mode", "tokenizer-info-endpoint"),
)


def test_every_flag_that_is_named_like_a_secret_is_one():
    named = [flag for flag in flag_table()["flags"] if re.search("key|token|secret|password|credential|auth", flag)]
    found = {flag for flag in named if not any(word in flag for word in NO_SECRETS)}
    assert found == set(SECRET_FLAGS)


def test_flags_of_a_configuration_file_come_before_others(tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("api-key: [a, b]\nseed: 3\nenforce-eager: true\nlog-error-stack: false\nhf-overrides: {x: 1}\n")
    assert with_config_file(["--seed", "4", "--config", str(file)]) == [
        *(
            "--api-key",
            "a",
            "b",
            "--seed",
            "3",
            "--enforce-eager",
            "--no-log-error-stack",
            "--hf-overrides",
            '{"x": 1}',
        ),
        *("--seed", "4"),
    ]


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", None])
def test_unreadable_configuration_file_is_named(tmp_path, text):
    file = tmp_path / "flags.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(StartupFailed, match=r"flags\.yaml"):
        with_config_file(["--config", str(file)])
