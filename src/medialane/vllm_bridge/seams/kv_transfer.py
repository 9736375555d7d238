"""vLLM's NIXL connector in an engine without a GPU, which shares its cores with others.

*Cores.* The connector pins the thread that makes it to the last core of each NUMA node, to keep it off the model's. In
our EngineCore that is the thread that runs the model, and threads that it starts later inherit it.

*Waiting.* NIXL's progress thread polls without a pause, so that each idle engine costs a core (nixl 1.5.1). With 1 ms
it costs 0.03 cores, and still wakes for transfers.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NIXL = "NixlConnector"

_PROGRESS_INTERVAL_US = 1000

_CREATE_CONNECTOR = KVConnectorFactory.create_connector


def yield_cores() -> None:
    """Change the NIXL connectors that are made in this process, or in one that is forked from it. Other engines do not
    import NIXL. Idempotent."""

    def create_connector(config: Any, role: Any, kv_cache_config: Any) -> Any:
        if config.kv_transfer_config is not None and config.kv_transfer_config.has_connector(NIXL):
            with suppress(ImportError):  # the connector says what is missing
                _change_nixl()
        return _CREATE_CONNECTOR(config, role, kv_cache_config)

    KVConnectorFactory.create_connector = create_connector


@cache
def _change_nixl() -> None:
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # as vLLM, which must set it before the import
    from nixl import _bindings as bindings  # imported lazily: few engines have connectors
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

    class PatientConfig(bindings.nixlAgentConfig):  # type: ignore[misc]  # nixl is not typed
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, _PROGRESS_INTERVAL_US if name == "pthrDelay" else value)

    make = NixlBaseConnectorWorker.__init__

    def __init__(self: Any, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:  # noqa: N807 - replaces it
        cores = os.sched_getaffinity(0)
        try:
            make(self, vllm_config, engine_id, kv_cache_config)
        finally:
            os.sched_setaffinity(0, cores)

    bindings.nixlAgentConfig = PatientConfig
    NixlBaseConnectorWorker.__init__ = __init__
