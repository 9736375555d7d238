"""NIXL, the only module that imports it; loaded by the mover process alone.

Measured facts that this relies on (nixl 1.5.1, UCX 1.23): the Python API sets the interval of the progress thread to
zero, so that it polls and an idle agent costs a core; with 10 ms it costs 0.005 cores, and transfers still wake it by
file descriptor events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import nixl
from nixl import _api as api
from nixl import _bindings as bindings

from medialane.transfer.nixl.agent import AgentError, Descriptor

_PROGRESS_INTERVAL_US = 10_000

#: nixl's exceptions have no base class of their own.
_ERRORS = (
    bindings.nixlBackendError,
    bindings.nixlCancelledError,
    bindings.nixlInvalidParamError,
    bindings.nixlMismatchError,
    bindings.nixlNotAllowedError,
    bindings.nixlNotFoundError,
    bindings.nixlNotPostedError,
    bindings.nixlNotSupportedError,
    bindings.nixlRemoteDisconnectError,
    bindings.nixlRepostActiveError,
    bindings.nixlUnknownError,
)


class _PatientConfig(bindings.nixlAgentConfig):  # type: ignore[misc]  # nixl is not typed
    """The Python API has no parameter for the interval; it sets the attribute to zero."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, _PROGRESS_INTERVAL_US if name == "pthrDelay" else value)


bindings.nixlAgentConfig = _PatientConfig


class NixlTransfer:
    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def is_done(self) -> bool:
        if self._state == "PROC":
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except _ERRORS as error:
                self._state = "ERR"
                raise _agent_error(error) from error
        if self._state == "ERR":
            raise AgentError("the transfer failed")
        return self._state == "DONE"

    def release(self) -> None:
        try:
            self._agent.release_xfer_handle(self._handle)
        except _ERRORS as error:
            raise RuntimeError(f"a transfer could not be released: {error}") from error


class NixlAgent:
    """An agent with the UCX backend. Raises AgentError if it cannot be created."""

    def __init__(self, name: str) -> None:
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW  # called from several threads
        try:
            self._agent = nixl.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], sync_mode=sync))
        except (*_ERRORS, RuntimeError) as error:
            raise _agent_error(error) from error
        if "UCX" not in self._agent.backends:
            raise AgentError("NIXL has no UCX plugin")

    def register(self, memory: Descriptor) -> None:
        region = [(memory.ptr, memory.size, memory.device_id, "")]
        try:
            self._agent.register_memory(region, memory.memory_type)
        except _ERRORS as error:
            raise _agent_error(error) from error

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        try:
            name: bytes | str = self._agent.add_remote_agent(metadata)
        except _ERRORS as error:
            raise _agent_error(error) from error
        return name.decode(errors="replace") if isinstance(name, bytes) else name

    def remove_peer(self, name: str) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except _ERRORS as error:
            raise _agent_error(error) from error

    def read(
        self, peer: str, sources: Sequence[Descriptor], destinations: Sequence[Descriptor], notification: bytes
    ) -> NixlTransfer:
        remote = [(source.ptr, source.size, source.device_id) for source in sources]
        local = [(segment.ptr, segment.size, 0) for segment in destinations]
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(local, "DRAM"),
                agent.get_xfer_descs(remote, sources[0].memory_type),
                peer,
                notification,
            )
        except _ERRORS as error:
            raise _agent_error(error) from error
        try:
            return NixlTransfer(agent, handle, agent.transfer(handle))
        except _ERRORS as error:
            NixlTransfer(agent, handle, "ERR").release()
            raise _agent_error(error) from error

    def notifications(self) -> list[bytes]:
        try:
            by_agent = self._agent.get_new_notifs()
        except _ERRORS as error:
            raise _agent_error(error) from error
        return [data for batch in by_agent.values() for data in batch]


def _agent_error(error: Exception) -> AgentError:
    return AgentError(f"{type(error).__name__}: {error}")
