"""Every flag of vLLM's server is honoured, refused, or of no meaning to a gateway: none is silently without effect.

The table of all flags that is read before vLLM is imported is the installed vLLM's own.
"""

import dataclasses
import json
from importlib.resources import files

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from medialane.core.errors import StartupFailed
from medialane.vllm_bridge.arguments import parse_vllm_args
from medialane.vllm_bridge.flag_table import flag_table
from medialane.vllm_bridge.server_flags import HONOURED, IRRELEVANT, REFUSED

pytestmark = pytest.mark.timeout(120)

#: A value of each refused flag that is not its default.
GIVEN = {
    "model_tag": ["another-model"],
    "host": ["--host=1.2.3.4"],
    "port": ["--port=9"],
    "uds": ["--uds=/tmp/x"],
    "headless": ["--headless"],
    "api_server_count": ["--api-server-count=2"],
    "grpc": ["--grpc"],
    "grpc_port": ["--grpc-port=9"],
    "data_parallel_supervisor_port": ["--data-parallel-supervisor-port=9"],
    "dp_supervisor_probe_interval_s": ["--dp-supervisor-probe-interval-s=9"],
    "dp_supervisor_probe_timeout_s": ["--dp-supervisor-probe-timeout-s=9"],
    "dp_supervisor_probe_failure_threshold": ["--dp-supervisor-probe-failure-threshold=9"],
    "enable_per_request_metrics": ["--enable-per-request-metrics"],
}


def test_every_server_flag_is_in_exactly_one_table():
    engine = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    server = {action.dest for action in make_arg_parser(FlexibleArgumentParser())._actions} - engine
    tables = [*HONOURED, *IRRELEVANT, *REFUSED]
    assert sorted(tables) == sorted(server | {"help"})


def test_every_rejected_flag_is_tested():
    assert GIVEN.keys() == REFUSED.keys()


@pytest.mark.parametrize("name", GIVEN)
def test_flag_without_effect_is_rejected(name):
    with pytest.raises(StartupFailed, match=r"is not for vLLM here|grpc"):
        parse_vllm_args("model", GIVEN[name])


def test_flag_in_a_config_file_is_rejected_too(tmp_path):
    (tmp_path / "flags.yaml").write_text("uds: /tmp/x\n")
    with pytest.raises(StartupFailed, match="--uds is not for vLLM here"):
        parse_vllm_args("model", ["--config", str(tmp_path / "flags.yaml")])


def test_different_model_after_the_double_dash_is_rejected():
    with pytest.raises(StartupFailed, match="--model is not for vLLM here"):
        parse_vllm_args("model", ["--model", "another"])


def test_flag_table_matches_the_installed_vllm():
    """Made anew by `python -m medialane.vllm_bridge.flag_table`."""
    assert json.loads(files("medialane.cluster").joinpath("vllm_flags.json").read_bytes()) == flag_table()
