"""KV blocks that engines read from each other, by a connector of vLLM: its configuration, which engines fit together,
and what a request's parameters are.

With a role, a worker has vLLM's NIXL connector unless `--kv-transfer-config` has chosen another one. The parameters
that the connector of one engine gives for a prompt are passed to that of another one, through gateways. They contain
the address of the first, to which the second connects: so a client's own are dropped, and vLLM, which trusts its
router, gets no others than these, with all fields that its connector reads.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Annotated, Any

import msgspec
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams

from medialane.types.errors import HandoverFailed, StartupFailed
from medialane.types.hashing import content_hash
from medialane.types.request import SIDE_CHANNEL_PORT, KvTransfer, WorkerRole
from medialane.vllm_bridge.seams.kv_transfer import NIXL

logger = logging.getLogger(__name__)

#: The sampling parameter that vLLM passes to its connector.
FOR_CONNECTOR = "kv_transfer_params"
_SIDE_CHANNEL_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
#: Engines may be asked for their addresses while others start: below the range of ports that the kernel gives away.
_PORTS = range(20_000, 30_000)

#: Until the first token of a prompt whose blocks are read. The engine's queue counts, so it is long.
TRANSFER_TIMEOUT_S = 60.0

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class NixlParams(msgspec.Struct, frozen=True):
    """The fields that vLLM's NIXL connector indexes. EngineCore ends if one is missing or of another type."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: _Name
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_block_ids: list[list[_Count]]
    tp_size: Annotated[int, msgspec.Meta(ge=1)]
    remote_num_tokens: _Count = 0
    dcp_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    pp_size: Annotated[int, msgspec.Meta(ge=1)] = 1


class Transfers:
    """What this engine reads from others, until the first outputs of its requests. `kept` has the parameters of the
    blocks that it keeps for others, empty without, by the requests that EngineCore has got and that have not ended."""

    def __init__(self, timeout_s: float = TRANSFER_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self.kept: dict[str, bytes] = {}
        self._reading: dict[str, asyncio.Timeout] = {}
        self._num_tokens: dict[str, int] = {}

    @asynccontextmanager
    async def in_time(self, request_id: str, transfer: KvTransfer | None) -> AsyncIterator[None]:
        """Raise HandoverFailed if a request that reads blocks has no output after a while: another engine hangs that
        has them, or the network between. Nothing else ends such a read."""
        if transfer is None or transfer.step == "send" or not transfer.params:
            yield
            return
        try:
            async with asyncio.timeout(self._timeout_s) as self._reading[request_id]:
                yield
        except TimeoutError as error:
            raise HandoverFailed(f"KV blocks were not read within {self._timeout_s:g} s") from error
        finally:
            self._reading.pop(request_id, None)

    def begun(self, request_id: str, num_tokens: int) -> None:
        """Note the first output, and how many tokens of the prompt were read."""
        if num_tokens:
            self._num_tokens[request_id] = num_tokens
        if (reading := self._reading.get(request_id)) is not None and not reading.expired():
            reading.reschedule(None)

    def take(self, request_id: str) -> int:
        """Return the number of tokens that were read, once."""
        return self._num_tokens.pop(request_id, 0)

    def note_kept(self, request_id: str, params: dict[str, Any]) -> None:
        if request_id in self.kept:
            self.kept[request_id] = encode_params(params)


def transfer_config(given: KVTransferConfig | None, role: WorkerRole) -> KVTransferConfig | None:
    """Return the configuration of an engine with this role: the user's own, or NIXL. Raises StartupFailed."""
    if role not in ("prefill", "decode"):
        return given
    if given is None:
        if importlib.util.find_spec("nixl") is None:
            raise StartupFailed(f"--role {role} needs NIXL (the extra nixl), or --kv-transfer-config")
        # A block that could not be read is computed: the engine has descriptors of all items of the prompt.
        extra = {"num_threads": 1} if current_platform.is_cpu() else {}
        return KVTransferConfig(
            kv_connector=NIXL,
            kv_role="kv_producer" if role == "prefill" else "kv_consumer",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        )
    if given.kv_connector is None:
        raise StartupFailed(f"--role {role} needs a kv_connector in --kv-transfer-config")
    if not (given.is_kv_producer if role == "prefill" else given.is_kv_consumer):
        raise StartupFailed(f"--role {role} is not possible with the kv_role {given.kv_role} in --kv-transfer-config")
    return given


def check_transfer(config: VllmConfig, role: WorkerRole) -> None:
    """Raise StartupFailed if engines of this model could not have the role."""
    if role not in ("prefill", "decode"):
        return
    model = config.model_config
    if model.runner_type == "pooling":
        raise StartupFailed(f"--role {role} is not possible: a pooling model generates nothing")
    if model.is_encoder_decoder:
        raise StartupFailed(f"--role {role} is not possible: the model has an encoder and a decoder")
    if model.is_hybrid and role == "decode" and config.cache_config.enable_prefix_caching:
        raise StartupFailed("--role decode needs --no-enable-prefix-caching: the model has Mamba layers")


def transfer_report(config: VllmConfig) -> tuple[str, str]:
    """Return the connector of workers of this model with the roles prefill and decode, or why there can be none."""
    transfer = config.kv_transfer_config
    try:
        for role in ("prefill", "decode"):
            transfer = transfer_config(config.kv_transfer_config, role)
            check_transfer(config, role)
    except StartupFailed as error:
        return "", error.message
    return "" if transfer is None else str(transfer.kv_connector), ""


def choose_address(args: AsyncEngineArgs, host: str = "") -> None:
    """Choose where NIXL connectors of this engine's ranks tell others where their memory is, unless the user has: at
    `host`, by which other hosts reach this one, if there are any, and at free ports. Raises StartupFailed if there are
    none."""
    config = args.kv_transfer_config
    if config is None or not config.has_connector(NIXL):
        return
    if host:
        os.environ.setdefault(_SIDE_CHANNEL_HOST, host)
    if SIDE_CHANNEL_PORT in os.environ:
        return
    num_ranks = args.data_parallel_size or 1
    start = os.getpid() * 16 % len(_PORTS)  # engines that start at once try different ones
    for number in range(0, len(_PORTS), num_ranks):
        first = _PORTS[(start + number) % (len(_PORTS) - num_ranks)]
        if _are_free(range(first, first + num_ranks)):
            os.environ[SIDE_CHANNEL_PORT] = str(first)
            return
    raise StartupFailed(f"no port is free for NIXL: set {SIDE_CHANNEL_PORT}")


def _are_free(ports: range) -> bool:
    try:
        with ExitStack() as stack:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("", port))
    except OSError:
        return False
    return True


def kv_group(config: VllmConfig) -> str:
    """Return what is equal for engines that can read each other's KV blocks; empty without a connector."""
    transfer, model, cache = config.kv_transfer_config, config.model_config, config.cache_config
    if transfer is None or transfer.kv_connector is None:
        return ""
    speculative = config.speculative_config
    facts = (
        *(vllm.__version__, model.model, model.revision, str(model.dtype), model.quantization),
        *(str(cache.cache_dtype), cache.block_size, current_platform.device_type),
        None if speculative is None else (speculative.method, speculative.model),
    )
    return f"{transfer.kv_connector}-{content_hash(msgspec.json.encode(facts))[:16]}"


def apply_transfer(params: SamplingParams, transfer: KvTransfer, config: KVTransferConfig | None) -> None:
    """Change the parameters of a request to what it does of the work."""
    found: dict[str, Any] | None
    if transfer.step != "receive":  # one token, which nobody reads
        params.max_tokens, params.min_tokens, params.n = 1, 0, 1
        params.stop, params.logprobs, params.structured_outputs = [], None, None
        params.output_kind = RequestOutputKind.FINAL_ONLY
    if transfer.step == "send":
        found = {"do_remote_decode": True, "do_remote_prefill": False}
    else:
        # The other one has them; vLLM reads no blocks for a request that wants them.
        params.prompt_logprobs, params.skip_reading_prefix_cache = None, False
        found = read_params(transfer.params, config)
    if found is not None and config is not None:
        params.extra_args = {**(params.extra_args or {}), FOR_CONNECTOR: found}


def read_params(data: bytes, config: KVTransferConfig | None) -> dict[str, Any] | None:
    """Return the connector's parameters; None if there are none, or they are unusable, which is logged: the engine then
    computes the prompt."""
    if not data or config is None:
        return None
    try:
        if config.has_connector(NIXL):
            msgspec.json.decode(data, type=NixlParams)
        params = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        logger.error("parameters of KV blocks are not used: %s", error)
        return None
    params.pop("remote_prefill_cached_tokens", None)  # vLLM would report it as what was cached here
    return params


def encode_params(params: dict[str, Any] | None) -> bytes:
    """Return what a connector has given for the blocks of a prompt."""
    return b"" if params is None else msgspec.json.encode(params)
