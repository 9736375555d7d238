"""Process placement and supervision: runs the processes of one host and leaves none behind. (`local` defines
these processes). `ray` does the same with the nodes of a Ray cluster.
"""

from medialane.cluster.child_process import (
    INTERPRETER,
    NOT_NEEDED,
    ChildProcess,
    ForkedChild,
    ForkRequest,
    HttpAnswers,
    NotForked,
    ProcessLog,
    ProcessSpec,
    SocketExists,
    WarmProcess,
    spawn_leader,
)
from medialane.cluster.local import check_join, check_join_listen
from medialane.cluster.model_hub import ModelHub, Repository, fetch_files, find_on_hub, repositories
from medialane.cluster.orphan_reaper import kill_members, members, send
from medialane.cluster.placement import (
    Engines,
    Hardware,
    find_gpus,
    parse_gpu_list,
    place_engines,
    usable_cores,
)
from medialane.cluster.preflight import check_flags, check_model, check_start
from medialane.cluster.supervisor import Observer, Restarts, Supervisor
from medialane.cluster.vllm_flags import (
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

__all__ = [
    "INTERPRETER",
    "NOT_NEEDED",
    "SECRET_FLAGS",
    "ChildProcess",
    "Engines",
    "ForkRequest",
    "ForkedChild",
    "Hardware",
    "HttpAnswers",
    "ModelHub",
    "NotForked",
    "Observer",
    "ProcessLog",
    "ProcessSpec",
    "Repository",
    "Restarts",
    "SocketExists",
    "Supervisor",
    "WarmProcess",
    "check_flags",
    "check_join",
    "check_join_listen",
    "check_model",
    "check_start",
    "engine_flags",
    "fetch_files",
    "find_gpus",
    "find_on_hub",
    "flag_table",
    "flag_value",
    "gpus_per_worker",
    "has_flag",
    "kill_members",
    "members",
    "parse_gpu_list",
    "place_engines",
    "processor_flags",
    "repositories",
    "send",
    "spawn_leader",
    "take_secrets",
    "untraced_flags",
    "usable_cores",
    "warm_flags",
    "with_config_file",
]
