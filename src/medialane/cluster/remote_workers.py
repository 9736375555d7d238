"""The workers of `medialane serve --ray`: what they run, and where they join the gateways of this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from medialane.cluster.local import own_flags
from medialane.cluster.placement import vllm_is_for_cpu
from medialane.cluster.remote import RemoteSpec
from medialane.cluster.vllm_flags import gpus_per_worker
from medialane.config import Config, settings_environ
from medialane.core.errors import StartupFailed
from medialane.rpc.address import TcpAddress, format_tcp, parse_address

#: Where gateways let workers join unless `--join-listen` is given.
JOIN_PORT = 7100
_ALL_INTERFACES = {"0.0.0.0", "::"}  # noqa: S104 - compared


def with_join_addresses(config: Config, *, node_address: str, num_nodes: int) -> Config:
    """Return the configuration with the address at which gateways let workers join, and which workers connect to.

    A cluster of one node uses loopback, which needs no secret. Raises StartupFailed.
    """
    default = format_tcp("127.0.0.1" if num_nodes == 1 else node_address, JOIN_PORT)
    listen = config.gateway.join_listen or default
    target = parse_address(listen)
    if not isinstance(target, TcpAddress) or not target.port:
        raise StartupFailed("--join-listen must be tcp://HOST:PORT, with the port that workers are to connect to")
    host = node_address if target.host in _ALL_INTERFACES else target.host
    joined = format_tcp(host, target.port).removeprefix("tcp://")
    return msgspec.structs.replace(
        config,
        gateway=msgspec.structs.replace(config.gateway, join_listen=listen),
        worker=msgspec.structs.replace(config.worker, join=",".join(filter(None, [joined, config.worker.join]))),
    )


def worker_specs(
    config: Config,
    model: str,
    vllm_args: Sequence[str],
    *,
    has_gpus: bool,
    node_flags: Mapping[str, tuple[str, ...]],
) -> list[RemoteSpec]:
    """Return the specifications of all workers, with the configuration of `with_join_addresses`; `has_gpus` is whether
    the cluster has any. Raises StartupFailed."""
    num_gpus = config.cluster.gpus_per_worker
    if num_gpus == "auto":
        num_gpus = gpus_per_worker(vllm_args) if has_gpus and not vllm_is_for_cpu() else 0
    prefix = config.worker.name or "{host}"
    unnamed = msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, name=""))
    return [
        RemoteSpec(
            name=f"worker {i}",
            command=("worker", model, *own_flags(unnamed, vllm_args, i)),
            joins_as=f"{prefix}/{i}",
            vllm_args=tuple(vllm_args),
            environ=settings_environ(unnamed),
            node_flags=node_flags,
            num_cpus=config.cluster.cpus_per_worker,
            num_gpus=num_gpus,
            stop_timeout_s=config.cluster.stop_timeout_s,
            max_log_bytes=config.cluster.max_log_bytes,
        )
        for i in range(config.cluster.num_workers)
    ]
