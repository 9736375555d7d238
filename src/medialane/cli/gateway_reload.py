"""What a gateway's parts have to do when its settings are read again, and how an operator has all gateways of a port do
it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from medialane.cli.reloading import Reloading
from medialane.config import Config
from medialane.config.reloading import ReloadAnswer, SettingsChange, replace
from medialane.core.errors import InvalidRequest, MedialaneError, StartupFailed
from medialane.gateway import AccessKeys, Gateway
from medialane.gateway.config import GatewayConfig
from medialane.gateway.gateway_metrics import AskOthers
from medialane.vllm_bridge.frontend.app import Frontend

logger = logging.getLogger(__name__)

#: What gateways of a port ask each other.
RELOAD = "reload"


class GatewayReload:
    """`own` are the settings of this gateway's parts, its share of those in `running`, made by `share`."""

    def __init__(
        self,
        reloading: Reloading,
        *,
        own: GatewayConfig,
        share: Callable[[GatewayConfig], GatewayConfig],
        gateway: Gateway,
        keys: AccessKeys,
        frontend: Frontend,
        ask_others: AskOthers,
    ) -> None:
        self._reloading = reloading
        self._own = own
        self._share = share
        self._gateway = gateway
        self._keys = keys
        self._frontend = frontend
        self._ask_others = ask_others
        reloading.prepare = self._prepare

    @property
    def answers(self) -> Mapping[str, Callable[[str], Awaitable[bytes]]]:
        """What other gateways of the port may ask."""
        return {RELOAD: self._answer}

    async def asked(self, _parameters: Mapping[str, str]) -> bytes:
        """Read the settings again: what can change now, and what needs a restart; a bad file changes nothing."""
        try:
            change = await self._reloading.reload()
        except StartupFailed as error:
            raise InvalidRequest(f"no setting was changed: {error.message}") from error
        missing = []
        for index, answer in (await self._ask_others(RELOAD)).items():
            if (other := _decoded(answer)) is None:
                missing.append(index)
            else:
                change |= other
        return msgspec.json.encode(ReloadAnswer(change.changed, change.needs_restart, change.files, missing))

    async def _answer(self, _path: str) -> bytes:
        try:
            return msgspec.json.encode(await self._reloading.reload())
        except MedialaneError as error:
            logger.error("no setting was changed: %s", error.message)
            return b"null"

    async def _prepare(self, loaded: Config) -> tuple[Callable[[], None], Sequence[str]]:
        """Read the files of keys and certificates. Raises StartupFailed."""
        use_keys, files = await asyncio.to_thread(self._keys.read_again, loaded.gateway)
        use_certificate = await asyncio.to_thread(self._frontend.read_certificate)

        def use() -> None:
            use_keys()
            if use_certificate is not None:
                use_certificate()
            shared = self._share(self._reloading.config.gateway)
            for field in GatewayConfig.__struct_fields__:
                if field != "stage":
                    replace(self._own, field, getattr(shared, field))
            self._gateway.settings_changed()

        return use, [*files, *(["--ssl-certfile"] if use_certificate is not None else [])]


def _decoded(answer: bytes | None) -> SettingsChange | None:
    """Return what another gateway has answered; None if it does not, or has failed."""
    try:
        return None if answer is None else msgspec.json.decode(answer, type=SettingsChange | None)
    except msgspec.DecodeError:
        return None
