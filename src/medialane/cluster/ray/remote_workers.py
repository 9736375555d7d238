"""The processes of `medialane serve --ray` on other hosts: what they run, and how they find each other.

With `--gateway-nodes head`, gateways and their store run on this host, and the first worker of any other host starts a
store there, which copies from ours. With `each`, every node runs `medialane serve` without workers, and the workers
join the gateways of all nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from medialane.cluster.local import base_url, own_flags
from medialane.cluster.placement import installed_version, vllm_is_for_cpu
from medialane.cluster.ray.remote import RemoteSpec
from medialane.cluster.vllm_flags import engine_flags, gpus_per_worker
from medialane.config import Config, settings_environ
from medialane.types.errors import StartupFailed
from medialane.wire.address import TcpAddress, format_tcp, parse_tcp
from medialane.wire.security import is_loopback

#: Where gateways let workers join unless `--join-listen` is given. Stores listen for others on the port before it.
JOIN_PORT = 7100
_ALL_INTERFACES = {"0.0.0.0", "::"}  # noqa: S104 - compared
#: Of the store that processes of a host share, as flags.
_SHARED_STORE = "unix:{folder}/store.sock"


class Nodes(NamedTuple):
    """Addresses: this host, the other nodes of the cluster; and the store of this host."""

    own: str
    others: Sequence[str]
    store: str


def with_join_addresses(config: Config, node: str, others: Sequence[str]) -> Config:
    """Return the configuration with the addresses at which gateways of this host, `node`, let workers join, at which
    its store lets other stores copy, and which workers connect to.

    A cluster of one node uses loopback, which needs no secret. Raises StartupFailed.
    """
    default = format_tcp(node if others else "127.0.0.1", JOIN_PORT)
    listen = config.gateway.join_listen or default
    target = parse_tcp(listen, "--join-listen", to_connect=True)
    if others and is_loopback(target.host):
        raise StartupFailed(f"--join-listen {listen}: workers on other nodes cannot connect to loopback")
    if config.cluster.gateway_nodes == "each" and others:
        _check_each(config, target, node)
        joined = [node, *others]
    else:
        joined = [node if target.host in _ALL_INTERFACES else target.host]
    num_gateways = 1 if config.cluster.num_gateways == "auto" else config.cluster.num_gateways
    ports = range(target.port, target.port + num_gateways)  # any may be down when a worker joins
    addresses = [format_tcp(host, port).removeprefix("tcp://") for host in joined for port in ports]
    peers = config.store.peer_listen or (format_tcp(node, target.port - 1) if others else "")
    return msgspec.structs.replace(
        config,
        gateway=msgspec.structs.replace(config.gateway, join_listen=listen),
        store=msgspec.structs.replace(config.store, peer_listen=peers),
        worker=msgspec.structs.replace(config.worker, join=",".join(filter(None, [*addresses, config.worker.join]))),
    )


def _check_each(config: Config, join: TcpAddress, node: str) -> None:
    """Raise StartupFailed for addresses that only one node has."""
    if join.host not in {*_ALL_INTERFACES, node}:
        raise StartupFailed(f"--gateway-nodes each: --join-listen tcp://0.0.0.0:{join.port}, as all nodes use it")
    if config.store.peer_listen:
        raise StartupFailed(
            "--gateway-nodes each: each store listens on the port before --join-listen: no --peer-listen"
        )
    host = config.server.host
    if host not in _ALL_INTERFACES and not is_loopback(host):
        raise StartupFailed(f"--gateway-nodes each: --host {host} is of one node; use 0.0.0.0, or loopback")


def gateway_specs(
    config: Config, model: str, vllm_args: Sequence[str], nodes: Nodes, *, folder: str
) -> list[RemoteSpec]:
    """Return the specifications of stores and gateways of the other nodes, with the configuration of
    `with_join_addresses`."""
    if config.cluster.gateway_nodes == "head":
        return []
    return [
        RemoteSpec(
            name=f"gateways of {node}",
            command=("serve", model, "--store-socket", "{folder}/store.sock"),
            ready_url=f"{base_url(config, vllm_args)}/health",
            vllm_args=tuple(vllm_args),
            environ=settings_environ(_of_node(config, node)),
            node=node,
            shared_folder=folder,
            layer=1,
            stop_timeout_s=config.stop.drain_timeout_s + config.cluster.stop_timeout_s,
            log_dir=config.cluster.log_dir,
            max_log_bytes=config.cluster.max_log_bytes,
        )
        for node in nodes.others
    ]


def _of_node(config: Config, node: str) -> Config:
    """Return the settings of gateways and store of another node: those of this one, with its addresses."""
    joined = parse_tcp(config.gateway.join_listen, "--join-listen")
    cluster = msgspec.structs.replace(config.cluster, num_workers=0, ray=False, ray_address="", gateway_nodes="head")
    return msgspec.structs.replace(
        config,
        cluster=cluster,
        gateway=msgspec.structs.replace(config.gateway, join_listen=format_tcp(node, joined.port)),
        store=msgspec.structs.replace(config.store, peer_listen=format_tcp(node, joined.port - 1)),
        worker=msgspec.structs.replace(config.worker, join="", name="", metrics_port=0),
    )


def worker_specs(
    config: Config, model: str, vllm_args: Sequence[str], nodes: Nodes, *, has_gpus: bool, folder: str
) -> list[RemoteSpec]:
    """Return the specifications of all workers, with the configuration of `with_join_addresses`; `has_gpus` is whether
    the cluster has any, `folder` the name of what processes of a host share. Raises StartupFailed."""
    num_gpus = _num_gpus(config, vllm_args, has_gpus=has_gpus)
    prefix = config.worker.name or "{host}"
    own = msgspec.structs.replace(
        config,
        worker=msgspec.structs.replace(config.worker, name=""),
        store=msgspec.structs.replace(config.store, peer_listen=""),  # of this host
    )
    with_gateways = nodes.others if config.cluster.gateway_nodes == "each" else ()
    node_flags = {
        nodes.own: ("--store", nodes.store),
        **dict.fromkeys(with_gateways, ("--store", _SHARED_STORE)),
        "": ("--store", _SHARED_STORE, "--start-store"),
    }
    return [
        RemoteSpec(
            name=f"worker {i}",
            command=("worker", model, *own_flags(own, vllm_args, i)),
            joins_as=f"{prefix}/{i}",
            vllm_args=tuple(engine_flags(vllm_args)),
            environ=settings_environ(own),
            node_flags=node_flags,
            shared_folder=folder,
            num_cpus=config.cluster.cpus_per_worker,
            num_gpus=num_gpus,
            stop_timeout_s=config.stop.drain_timeout_s + config.cluster.stop_timeout_s,
            log_dir=config.cluster.log_dir,
            max_log_bytes=config.cluster.max_log_bytes,
        )
        for i in range(config.cluster.num_workers)
    ]


def _num_gpus(config: Config, vllm_args: Sequence[str], *, has_gpus: bool) -> int:
    """Return the GPUs of each worker. Raises StartupFailed if vLLM could not use them, or needs others."""
    given, needed = config.cluster.gpus_per_worker, gpus_per_worker(vllm_args)
    if vllm_is_for_cpu():
        if given not in ("auto", 0):
            raise StartupFailed(
                f"--gpus-per-worker {given}: the installed vLLM is a build for CPUs; install the extra vllm, or use 0"
            )
        return 0
    if given != "auto" and 0 < given < needed:
        raise StartupFailed(f"--gpus-per-worker {given}: the vLLM flags after `--` need {needed}")
    num_gpus = (needed if has_gpus else 0) if given == "auto" else given
    if not num_gpus and installed_version("vllm") is not None:
        where = "no node of the Ray cluster has a GPU" if given == "auto" else "--gpus-per-worker 0"
        raise StartupFailed(f"{where}, but the installed vLLM needs one; the extra cpu is for CPUs")
    return num_gpus
