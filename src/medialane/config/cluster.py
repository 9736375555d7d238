"""Settings of the supervisor."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import field

from medialane.types.errors import StartupFailed
from medialane.types.setting import NonNegativeFloat, NonNegativeInt, PositiveFloat, check_bounds
from medialane.wire.address import parse_tcp

MIB = 1 << 20

#: `--gateways auto`: vLLM's engines, preparers and the store need the other cores.
_CORES_PER_GATEWAY = 4
_MAX_AUTO_GATEWAYS = 8


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The number of processes, and the timeouts of starts, stops and restarts."""

    num_workers: NonNegativeInt = field(default=1, name="workers")
    """vLLM workers on this machine, with --ray in the cluster; 0: only those that join (--join-listen)"""
    num_encoders: NonNegativeInt = field(default=0, name="encoders")
    """vLLM workers on this machine, besides --workers, that only encode new media for the others; without KV cache"""
    encoder_gpu_share: NonNegativeFloat = field(default=0.0, name="encoder-gpu-share")
    """part of a worker's GPU memory for the encoders that share its GPUs, such as 0.2; 0: encoders have GPUs of their
    own, with --single-gpu an equal part"""
    num_gateways: int | Literal["auto"] = field(default=1, name="gateways")
    """gateway processes that share the port; auto is one for four cores, at most 8"""
    single_gpu: bool = field(default=False, name="single-gpu")
    """let all workers share the first GPU and split its memory, one starting after another"""
    ray: bool = field(default=False, name="ray")
    """let Ray place the workers on the nodes of its cluster and restart them; run it on a node of the cluster"""
    ray_address: str = field(default="", name="address")
    """Ray cluster to use: HOST:PORT of its head; default: RAY_ADDRESS, or the cluster of this host, else a new one"""
    gateway_nodes: Literal["head", "each"] = field(default="head", name="gateway-nodes")
    """where gateways run with --ray: head (the node of this command) or each (all nodes that the cluster has at the
    start, each with a store of its own)"""
    gpus_per_worker: int | Literal["auto"] = field(default="auto", name="gpus-per-worker")
    """GPUs that Ray reserves for each worker; auto: what the vLLM flags need, 0 for vLLM's CPU build"""
    cpus_per_worker: PositiveFloat = field(default=1.0, name="cpus-per-worker")
    """CPUs that Ray reserves for each worker; without a GPU, also the number of its threads"""
    warm_start: bool = field(default=True, name="warm-start")
    """import vLLM and read the model once per host, in a process from which gateways, workers and the store are forked;
    no: each does so itself, which takes longer and more memory"""
    start_timeout_s: PositiveFloat = field(default=1800.0, name="start-timeout")
    """longest time until a worker has loaded its model and the gateway answers"""
    stop_timeout_s: PositiveFloat = field(default=40.0, name="stop-timeout")
    """how long a worker may take to stop before it is killed"""
    restart_initial_s: float = field(default=1.0, name="restart-initial")
    """delay before a process that exited is restarted; doubles each time. One that had become ready is restarted at
    once the first time, and after at most 4 s if it exits again and again"""
    restart_max_s: float = field(default=30.0, name="restart-max")
    """longest delay before a restart"""
    restart_reset_s: PositiveFloat = field(default=60.0, name="restart-reset")
    """time without an exit after which the restart delay is reset"""
    log_dir: str = field(default="", name="log-dir")
    """folder of the processes' logs, one file each, which are appended to and kept; default: a private folder in
    TMPDIR, kept only if the run fails (the newest five)"""
    max_log_bytes: int = field(default=16 * MIB, name="max-log-bytes")
    """size at which a process's log file is rotated; the newer half is kept as .old"""

    def validate(self) -> None:
        """Raise StartupFailed naming the invalid setting."""
        check_bounds(self)
        if self.num_gateways != "auto" and self.num_gateways < 1:
            raise StartupFailed("num_gateways must be at least 1, or auto")
        if self.gpus_per_worker != "auto" and self.gpus_per_worker < 0:
            raise StartupFailed("gpus_per_worker must not be negative")
        self._check_ray()
        self._check_encoders()
        if not 0 < self.restart_initial_s <= self.restart_max_s:
            raise StartupFailed("restart_initial_s must be positive and at most restart_max_s")
        if self.max_log_bytes < MIB:
            raise StartupFailed("max_log_bytes must be at least 1MiB")

    def _check_ray(self) -> None:
        if self.ray and self.single_gpu:
            raise StartupFailed("single_gpu is for workers of this host, without --ray")
        if self.ray_address and not self.ray:
            raise StartupFailed("ray_address needs --ray")
        if "://" not in self.ray_address and self.ray_address not in ("", "auto", "local"):
            parse_tcp(self.ray_address, "--address", to_connect=True)
        if self.gateway_nodes != "head" and not self.ray:
            raise StartupFailed("gateway_nodes needs --ray")
        if self.ray and not self.num_workers:
            raise StartupFailed("num_workers must be at least 1 with --ray")

    def _check_encoders(self) -> None:
        if self.ray and self.num_encoders:
            raise StartupFailed("num_encoders is for this host, without --ray: encoders write to the gateway's arena")
        if self.encoder_gpu_share >= 1:
            raise StartupFailed("encoder_gpu_share must be less than 1")
        if self.encoder_gpu_share and not self.num_encoders:
            raise StartupFailed("encoder_gpu_share needs --encoders")

    def resolved_num_gateways(self, num_cores: int) -> int:
        """Return the number of gateways on a host with this many cores."""
        if self.num_gateways == "auto":
            return max(1, min(_MAX_AUTO_GATEWAYS, num_cores // _CORES_PER_GATEWAY))
        return self.num_gateways
