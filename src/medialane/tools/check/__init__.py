"""`medialane check`: the same requests to plain vLLM and to medialane, and their answers compared.

`run` starts both servers; what it sends comes from `kinds`, one file for each kind of endpoint. `tensor_program` is a
process of its own, and alone imports vLLM.
"""

from medialane.tools.check.case import Answer, Case, EndpointKind, Request, Upload, reason_in
from medialane.tools.check.client import CheckClient
from medialane.tools.check.display import show, show_tensors
from medialane.tools.check.media import items_named
from medialane.tools.check.results import CaseResult, CheckReport, compare, decode, encode
from medialane.tools.check.run import run_check
from medialane.tools.check.servers import (
    CheckProgress,
    CheckSetup,
    Launch,
    ServerProcess,
    Start,
    free_port,
    log_tail,
    medialane_process,
    plain_process,
    plain_vllm,
    server_process,
)
from medialane.tools.check.tensors import TensorReport, compare_tensors

__all__ = [
    "Answer",
    "Case",
    "CaseResult",
    "CheckClient",
    "CheckProgress",
    "CheckReport",
    "CheckSetup",
    "EndpointKind",
    "Launch",
    "Request",
    "ServerProcess",
    "Start",
    "TensorReport",
    "Upload",
    "compare",
    "compare_tensors",
    "decode",
    "encode",
    "free_port",
    "items_named",
    "log_tail",
    "medialane_process",
    "plain_process",
    "plain_vllm",
    "reason_in",
    "run_check",
    "server_process",
    "show",
    "show_tensors",
]
