"""The embeddings of one engine, as its front end sees them: the card of its encoder, readable arenas, counters."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from vllm.config import ModelConfig, VllmConfig

from medialane.types.errors import GenerationFailed
from medialane.types.hashing import content_hash
from medialane.types.request import EmbeddingCounts, EncoderCard, WorkerRole
from medialane.vllm_bridge.engine.encoder_card import UnknownEncoder, encoder_card, weights_version
from medialane.vllm_bridge.engine.engine_options import EncodeCache, checked
from medialane.vllm_bridge.learned.embeds import AcceptedEmbeds

logger = logging.getLogger(__name__)

#: Calls a utility of every EngineCore: (name, *arguments, timeout_s=). Raises GenerationFailed, WorkerLost.
Ask = Callable[..., Awaitable[list[Any]]]

#: Covers the first run of an encoder, which may compile kernels.
MEASURE_TIMEOUT_S = 300.0

_TIMEOUT_S = 20.0


class EngineEmbeddings:
    """`card` is None, and `reason` says why, if embeddings are not kept. `arenas` can be read by all of the engine's
    processes. Made before the engine: weights that are replaced while it loads them are not known."""

    def __init__(self, config: VllmConfig, *, wanted: EncodeCache, reason: str, role: WorkerRole = "worker") -> None:
        self.card: EncoderCard | None = None
        self.reason = reason
        self.arenas: set[str] = set()
        self.counts = EmbeddingCounts()
        self.longest_step_s = 0.0  # that embeddings took of a step of a scheduler
        self._config = config
        self._digest = ""  # of the encoder as it was loaded
        self._weights = "" if reason else _weights(config)  # before it is
        self._wanted: EncodeCache = wanted
        self._role: WorkerRole = role

    async def learn(self, ask: Ask) -> None:
        """Set `card`, or `reason`. Raises StartupFailed if embeddings must be kept and cannot, WorkerLost."""
        if not self.reason:
            try:
                engines = await ask("medialane_encoder", timeout_s=MEASURE_TIMEOUT_S)
                measured = [rank for ranks in engines for rank in ranks]
                loop = asyncio.get_running_loop()
                card = await loop.run_in_executor(None, encoder_card, self._config, measured)
                if self._weights not in ("", await loop.run_in_executor(None, _weights, self._config)):
                    raise UnknownEncoder("the files of the weights have changed while the engine started")
                self.card, self._digest = card, card.digest
            except (UnknownEncoder, GenerationFailed) as error:
                self.reason = checked(self._wanted, str(error), self._role)
        if self.card is None:
            logger.info("the encoder's outputs are not kept: %s", self.reason)
        else:
            widths = ", ".join(f"{modality} {width}" for modality, width in self.card.widths.items())
            logger.info("the encoder's outputs are kept: %s x %s", widths, self.card.dtype)

    async def attach(self, ask: Ask, arena: str, directory: str, nonce: bytes) -> None:
        """Have the processes that run the model map an arena that EngineCore has mapped."""
        if self.card is None:
            return
        if all(await ask("medialane_attach_ranks", arena, directory, nonce.hex(), timeout_s=_TIMEOUT_S)):
            self.arenas.add(arena)
        else:
            logger.warning("the engine's processes cannot map the arena: embeddings are not loaded")

    async def detach(self, ask: Ask, arena: str) -> None:
        if arena in self.arenas:
            self.arenas.discard(arena)
            await ask("medialane_detach_ranks", arena, timeout_s=_TIMEOUT_S)

    def renew(self, salt: str) -> None:
        """Give the encoder a new digest: its weights may change, and embeddings made until now must not be used.

        Engines with the same encoder and the same last `salt` have the same digest, whatever they were given before.
        """
        if self.card is not None:
            digest = content_hash(f"{self._digest} {salt or secrets.token_hex(16)}".encode())
            self.card = msgspec.structs.replace(self.card, digest=digest)

    async def drop_fills(self, ask: Ask) -> None:
        """Save no embeddings of the requests that the engine has."""
        if self.card is not None:
            await ask("medialane_drop_fills", timeout_s=_TIMEOUT_S)

    async def refresh(self, ask: Ask, *, timeout_s: float) -> None:
        """Update `counts` and `longest_step_s`."""
        if self.card is not None:
            totals_of_ranks = [totals for totals in await ask("medialane_embeddings", timeout_s=timeout_s) if totals]
            self.counts = EmbeddingCounts(*map(sum, zip(*(counts for counts, _ in totals_of_ranks), strict=True)))
            self.longest_step_s = max((longest_s for _, longest_s in totals_of_ranks), default=0.0)


def _weights(config: VllmConfig) -> str:
    """Return the version of the model's weights; empty if it is unknown, as that of a model that is not downloaded."""
    try:
        return weights_version(config)
    except UnknownEncoder:
        return ""


async def accepted_embeds(config: ModelConfig, ask: Ask) -> AcceptedEmbeds | None:
    """Have the engine find out in which form its model accepts embeddings of clients; None if they may send none, or
    it is unknown."""
    media = config.multimodal_config
    if media is None or not media.enable_mm_embeds or not config.supports_multimodal_inputs:
        return None
    try:
        engines = await ask("medialane_try_embeds", timeout_s=MEASURE_TIMEOUT_S)
    except GenerationFailed as error:
        logger.warning("whether the model accepts image_embeds is unknown: %s", error.message)
        return None
    accepted: AcceptedEmbeds = engines[0][0]
    if accepted["fault"]:
        logger.warning("image_embeds are refused, as the model does not accept them: %s", accepted["fault"])
    return accepted
