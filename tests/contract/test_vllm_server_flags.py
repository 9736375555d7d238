"""Every flag of vLLM's server is applied, rejected, or irrelevant to a gateway: none is silently ignored.

The table of all flags that is read before vLLM is imported is the installed vLLM's own.
"""

import ast
import dataclasses
import inspect
import json
import textwrap
from importlib.resources import files

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from medialane.types.errors import StartupFailed
from medialane.vllm_bridge.server_flags import UNSUPPORTED_FLAGS
from vllm_configs import vllm_args
from vllm_flag_table import PROCESSOR_GROUPS, flag_table

pytestmark = pytest.mark.timeout(120)

#: Flags that a gateway applies, by the place where they take effect.
APPLIED = (
    # vLLM's parser reads the file, and the other flags of this table from it
    "config",
    # http_server.uvicorn_config
    "uvicorn_log_level", "disable_uvicorn_access_log", "disable_access_log_for_endpoints", "ssl_keyfile",
    "ssl_certfile", "ssl_ca_certs", "enable_ssl_refresh", "ssl_cert_reqs", "ssl_ciphers",
    "h11_max_incomplete_event_size", "h11_max_header_count",
    # vLLM's build_app
    "allow_credentials", "allowed_origins", "allowed_methods", "allowed_headers", "api_key", "root_path", "middleware",
    "enable_request_id_headers", "disable_fastapi_docs", "enable_offline_docs", "log_error_stack",
    "enable_tokenizer_info_endpoint", "enable_scale_out",
    # vLLM's init_app_state
    "lora_modules", "chat_template", "chat_template_content_format", "trust_request_chat_template",
    "trust_request_mm_kwargs", "default_chat_template_kwargs", "response_role", "return_tokens_as_token_ids",
    "enable_auto_tool_choice", "exclude_tools_when_tool_choice_none", "tool_call_parser", "tool_parser_plugin",
    "tool_strict_level", "tool_server", "max_log_len", "enable_prompt_tokens_details", "enable_server_load_tracking",
    "enable_force_include_usage", "sse_keep_alive_interval", "enable_log_outputs", "enable_log_deltas",
    "cohere_is_reasoning_model", "cohere_format", "anthropic_disabled_thinking_effort", "fingerprint_mode",
    "fingerprint_value",
)  # fmt: skip

#: Flags without a meaning for a gateway: the parser's own, and one for scoring by pooling models.
IRRELEVANT = ("help", "enable_flash_late_interaction")

#: A non-default value of each rejected flag.
GIVEN = {
    "model_tag": ["another-model"],
    "host": ["--host=1.2.3.4"],
    "port": ["--port=9"],
    "uds": ["--uds=/tmp/x"],
    "headless": ["--headless"],
    "api_server_count": ["--api-server-count=2"],
    "allowed_media_domains": ["--allowed-media-domains", "example.org", "example.com"],
    "allowed_local_media_path": ["--allowed-local-media-path=/tmp"],
    "grpc": ["--grpc"],
    "grpc_port": ["--grpc-port=9"],
    "data_parallel_supervisor_port": ["--data-parallel-supervisor-port=9"],
    "dp_supervisor_probe_interval_s": ["--dp-supervisor-probe-interval-s=9"],
    "dp_supervisor_probe_timeout_s": ["--dp-supervisor-probe-timeout-s=9"],
    "dp_supervisor_probe_failure_threshold": ["--dp-supervisor-probe-failure-threshold=9"],
    "enable_per_request_metrics": ["--enable-per-request-metrics"],
}


def actions():
    return make_arg_parser(FlexibleArgumentParser())._actions  # argparse has no list of its flags


def test_every_server_flag_is_in_exactly_one_table():
    engine = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    server = {action.dest for action in actions()} - engine
    tables = [*APPLIED, *IRRELEVANT, *(name for name in UNSUPPORTED_FLAGS if name not in engine)]
    assert sorted(tables) == sorted(server | {"help"})


def test_every_rejected_flag_is_tested():
    assert GIVEN.keys() == UNSUPPORTED_FLAGS.keys()


@pytest.mark.parametrize("name", GIVEN)
def test_flag_without_effect_is_rejected(name):
    with pytest.raises(StartupFailed, match=r"is not for vLLM here|grpc"):
        vllm_args("model", GIVEN[name])


def test_vllms_ban_of_redirects_is_rejected(monkeypatch):
    """vLLM fetches nothing here: a ban without effect would leave an operator unprotected."""
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    with pytest.raises(StartupFailed, match="--media-max-redirects 0"):
        vllm_args("model", [])


def test_flag_in_a_config_file_is_rejected_too(tmp_path):
    (tmp_path / "flags.yaml").write_text("uds: /tmp/x\n")
    with pytest.raises(StartupFailed, match="--uds is not for vLLM here"):
        vllm_args("model", ["--config", str(tmp_path / "flags.yaml")])


def test_different_model_after_the_double_dash_is_rejected():
    with pytest.raises(StartupFailed, match="--model is not for vLLM here"):
        vllm_args("model", ["--model", "another"])


def recorded_table():
    return json.loads(files("medialane.cluster").joinpath("vllm_flags.json").read_bytes())


def out_of_bounds(kind):
    """The number next to the first bound of `float > 0 <= 1`."""
    _, comparison, limit = kind.split()[:3]
    number = int(float(limit)) - {">": 0, ">=": 1}[comparison]
    return str(number)


@pytest.mark.parametrize(
    ("flag", "number"),
    [
        (flag, out_of_bounds(kind))
        for flag, kind in recorded_table()["flags"].items()
        if isinstance(kind, str) and " " in kind
    ],
)
def test_number_out_of_the_recorded_bounds_is_rejected_by_vllm(flag, number, tiny_model):
    args = vllm_args(str(tiny_model), [f"{flag}={number}", "--enforce-eager", "--enable-lora"])
    with pytest.raises(ValueError, match="Input should be greater than"):
        AsyncEngineArgs.from_cli_args(args).create_engine_config()


def test_flag_table_matches_the_installed_vllm():
    """Regenerated by `python tests/vllm_flag_table.py`."""
    assert recorded_table() == flag_table()


def test_model_config_is_made_from_the_flags_that_a_store_gets():
    """Other flags are kept from stores and preparers."""
    source = ast.parse(textwrap.dedent(inspect.getsource(AsyncEngineArgs.create_model_config)))
    read = {
        node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    groups = {action.dest: action.container.title for action in actions()}
    assert {groups[name] for name in read & groups.keys()} == set(PROCESSOR_GROUPS)
