"""`medialane check`: the same requests to plain vLLM and to medialane, and their answers compared.

`run` starts both servers; what it sends comes from `kinds`, one file for each kind of endpoint. `tensor_program` is a
process of its own, and alone loads vLLM, through the bridge.
"""

from medialane.tools.check.case import Answer, Case, CaseRequest, EndpointKind, Upload
from medialane.tools.check.client import CheckClient
from medialane.tools.check.results import CaseResult, CheckReport, compare, encode, show
from medialane.tools.check.run import run_check
from medialane.tools.check.servers import (
    CheckProgress,
    CheckSetup,
    Launch,
    ServerProcess,
    free_port,
    log_tail,
    plain_vllm,
    server_process,
)
from medialane.tools.check.tensors import TensorReport, show_tensors

__all__ = [
    "Answer",
    "Case",
    "CaseRequest",
    "CaseResult",
    "CheckClient",
    "CheckProgress",
    "CheckReport",
    "CheckSetup",
    "EndpointKind",
    "Launch",
    "ServerProcess",
    "TensorReport",
    "Upload",
    "compare",
    "encode",
    "free_port",
    "log_tail",
    "plain_vllm",
    "run_check",
    "server_process",
    "show",
    "show_tensors",
]
