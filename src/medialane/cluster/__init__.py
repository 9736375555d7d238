"""Process placement and supervision: runs the processes of one host and leaves none behind. (`local` defines
these processes). `ray` does the same with the nodes of a Ray cluster.
"""

from medialane.cluster.child_process import CLEAN_EXIT, ChildProcess, spawn_leader
from medialane.cluster.local import check_join, check_join_listen, check_metrics_ports, check_port
from medialane.cluster.log_folder import LogFolder
from medialane.cluster.model_files import fetch_files, repositories
from medialane.cluster.model_groups import ModelGroup
from medialane.cluster.orphan_reaper import OrphanReaper
from medialane.cluster.placement import (
    VISIBLE,
    Hardware,
    find_gpus,
    find_hardware,
    installed_version,
    usable_cores,
    vllm_is_for_cpu,
)
from medialane.cluster.preflight import check_flags, check_model, check_start
from medialane.cluster.process_spec import INTERPRETER, NOT_NEEDED, HttpAnswers, ProcessSpec, ReadyCheck, SocketExists
from medialane.cluster.process_supervisor import Observer
from medialane.cluster.supervisor import Supervisor, running
from medialane.cluster.vllm_flags import (
    API_KEY,
    HF_TOKEN,
    TLS_FLAGS,
    TRACES_ENDPOINT,
    flag_value,
    has_flag,
    processor_flags,
    ranks_per_worker,
    take_secrets,
    untraced_flags,
    with_config_file,
)
from medialane.cluster.warm import Fork, receive_fork

__all__ = [
    "API_KEY",
    "CLEAN_EXIT",
    "HF_TOKEN",
    "INTERPRETER",
    "NOT_NEEDED",
    "TLS_FLAGS",
    "TRACES_ENDPOINT",
    "VISIBLE",
    "ChildProcess",
    "Fork",
    "Hardware",
    "HttpAnswers",
    "LogFolder",
    "ModelGroup",
    "Observer",
    "OrphanReaper",
    "ProcessSpec",
    "ReadyCheck",
    "SocketExists",
    "Supervisor",
    "check_flags",
    "check_join",
    "check_join_listen",
    "check_metrics_ports",
    "check_model",
    "check_port",
    "check_start",
    "fetch_files",
    "find_gpus",
    "find_hardware",
    "flag_value",
    "has_flag",
    "installed_version",
    "processor_flags",
    "ranks_per_worker",
    "receive_fork",
    "repositories",
    "running",
    "spawn_leader",
    "take_secrets",
    "untraced_flags",
    "usable_cores",
    "vllm_is_for_cpu",
    "with_config_file",
]
