"""The embeddings of one engine, as its front end sees them: the card of its encoder, readable arenas, counters.

The card says which encoder an engine has: everything that its embeddings depend on, as a digest. Workers with equal
digests use each other's embeddings. So the digest includes the weights: the commit of a model of a hub, or samples of
the files in a folder, which are the same on each host. Reading whole files would take minutes. The samples include
every tensor: training changes a tensor everywhere, but perhaps only a small one (a projector).

What else is on the card, and whether embeddings can be kept, is measured where the model runs (`engine_core`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import msgspec
import torch
import transformers
import vllm
from huggingface_hub import try_to_load_from_cache
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform

from medialane.types.errors import GenerationFailed, StartupFailed
from medialane.types.hashing import content_hash, digest
from medialane.types.request import ENCODER, EmbeddingCounts, EncodeCache, EncoderCard, WorkerRole
from medialane.vllm_bridge.engine.embedding_connector import DIRECTORY, EmbeddingConnector
from medialane.vllm_bridge.engine.unexpanded_prompt import AcceptedEmbeds
from medialane.vllm_bridge.learned.settings import describe
from medialane.vllm_bridge.seams import encoder_cache

logger = logging.getLogger(__name__)

#: Calls a utility of every EngineCore: (name, *arguments, timeout_s=). Raises GenerationFailed, WorkerLost.
Ask = Callable[..., Awaitable[list[Any]]]

#: Covers the first run of an encoder, which may compile kernels.
MEASURE_TIMEOUT_S = 300.0

_TIMEOUT_S = 20.0


class EngineEmbeddings:
    """`card` is None, and `reason` says why, if embeddings are not kept. `arenas` can be read by all of the engine's
    processes. Made before the engine: weights that are replaced while it loads them are not known."""

    def __init__(
        self, config: VllmConfig, wanted: EncodeCache, *, arena_directory: str, role: WorkerRole = "worker"
    ) -> None:
        """Make the engine of this configuration load and save embeddings, an encoder's only save them, if it can.
        Raises StartupFailed if they are `wanted`, or are all that the engine is for, and it cannot."""
        self._config = config
        self._wanted: EncodeCache = wanted
        self._role: WorkerRole = role
        self._arena_directory = arena_directory
        only_encodes = role == ENCODER
        unfit = encoder_cache.unfit_reason(config, only_encodes=only_encodes)
        self.reason = self._checked("--encode-cache off" if wanted == "off" else unfit)
        if not self.reason:
            settings = {DIRECTORY: arena_directory}
            encoder_cache.connect(config, EmbeddingConnector, settings, only_encodes=only_encodes)
        self.card: EncoderCard | None = None
        self.arenas: set[str] = set()
        self.counts = EmbeddingCounts()
        self._digest = ""  # of the encoder as it was loaded
        self._weights = "" if self.reason else _weights(config)  # before it is

    def _checked(self, reason: str) -> str:
        """Return the reason why embeddings are not kept. Raises StartupFailed if they must be."""
        if reason and self._role == ENCODER:
            raise StartupFailed(f"--role encoder is not possible: {reason}")
        if reason and self._wanted == "on":
            raise StartupFailed(f"--encode-cache on is not possible: {reason}")
        return reason

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
                self.reason = self._checked(str(error))
        if self.card is None:
            logger.info("the encoder's outputs are not kept: %s", self.reason)
        else:
            widths = ", ".join(f"{modality} {width}" for modality, width in self.card.widths.items())
            logger.info("the encoder's outputs are kept: %s x %s", widths, self.card.dtype)

    async def attach(self, ask: Ask, arena: str, nonce: bytes) -> None:
        """Have the processes that run the model map an arena that EngineCore has mapped."""
        if self.card is None:
            return
        where = arena, self._arena_directory, nonce.hex()
        if all(await ask("medialane_attach_ranks", *where, timeout_s=_TIMEOUT_S)):
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
        """Update `counts`."""
        if self.card is not None:
            counts_of_ranks = [counts for counts in await ask("medialane_embeddings", timeout_s=timeout_s) if counts]
            self.counts = EmbeddingCounts(*map(sum, zip(*counts_of_ranks, strict=True)))


def _weights(config: VllmConfig) -> str:
    """Return the version of the model's weights; empty if it is unknown, as of a model that is not downloaded."""
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


class Measured(TypedDict):
    """By modality: the width and dtype of embeddings, or why they cannot be kept. Sent as msgpack."""

    widths: dict[str, int]
    dtypes: dict[str, str]
    faults: dict[str, str]


#: Suffixes of files with weights.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")

#: Of each file: its beginning, where a safetensors file has names, types and places of its tensors; then samples.
_HEADER_BYTES = 1 << 20

_SAMPLE_BYTES = 64 << 10

#: In all files together, at least one of each.
_MAX_SAMPLES = 512

#: Of the middle of each tensor of a safetensors file.
_TENSOR_BYTES = 4 << 10

#: The format's own limit.
_MAX_HEADER_BYTES = 100 << 20


class UnknownEncoder(Exception):
    """Embeddings cannot be kept; the message says why."""


def encoder_card(config: VllmConfig, measured: Sequence[Measured]) -> EncoderCard:
    """Return the card of an engine with this configuration, of whose ranks these are the measurements. Reads files.

    Raises UnknownEncoder.
    """
    first = measured[0]
    if any(other != first for other in measured):
        raise UnknownEncoder(f"the engine's ranks have different encoders: {measured}")
    dtypes = set(first["dtypes"].values())
    if len(dtypes) != 1:
        faults = "; ".join(f"{modality}: {why}" for modality, why in first["faults"].items())
        raise UnknownEncoder(faults or f"embeddings have the dtypes {sorted(dtypes)}")
    return EncoderCard(encoder_digest(config), dtypes.pop(), first["widths"])  # type: ignore[arg-type]  # `spec_of`


def encoder_digest(config: VllmConfig) -> str:
    """Return the digest of all that the encoder's output depends on besides the feature. Raises UnknownEncoder."""
    model, media, parallel = config.model_config, config.model_config.multimodal_config, config.parallel_config
    settings = {name: str(getattr(media, name)) for name in _media_settings(media)}
    return digest(
        {
            "weights": weights_version(config),
            "config": _config(model.hf_config),
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "load format": str(config.load_config.load_format),
            "tensor parallel": parallel.tensor_parallel_size,
            "compiled": bool(config.compilation_config.compile_mm_encoder),
            "device": str(current_platform.get_device_name()),
            "versions": [str(module.__version__) for module in (vllm, torch, transformers)],
            **settings,
        }
    )


def _media_settings(media: Any) -> list[str]:
    """Return the names of settings that change the encoder: its attention, its parallelism, where pixels are
    normalised. Not whether the engine has a language model: an encoder's digest equals the workers'."""
    own = [field.name for field in fields(media) if field.name.startswith("mm_encoder_")]
    return ["mm_device_do_normalize", *(name for name in own if name != "mm_encoder_only")]


def _config(hf_config: Any) -> str:
    settings = {k: v for k, v in hf_config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    return describe(settings).text


def weights_version(config: VllmConfig) -> str:
    """Return what is equal for equal weights on every host. Raises UnknownEncoder."""
    model = config.model_config
    if config.load_config.load_format == "dummy":
        return f"random {model.seed}"
    if model.model_weights:
        raise UnknownEncoder("the version of weights in an object store is unknown")
    folder = Path(model.model)
    if folder.is_dir():
        return digest({"files": _files(folder)})
    path = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    commit = Path(path).parent.name if isinstance(path, str) else ""
    if not commit:
        raise UnknownEncoder("the commit of the model's weights is unknown")
    return f"{model.model}@{commit}"


def _files(folder: Path) -> dict[str, str]:
    """Return a digest of samples of each file with weights, by name. Raises UnknownEncoder if there is none."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
    if not paths:
        raise UnknownEncoder(f"no files with weights in {folder}")
    try:
        return {path.name: _sampled(path, max(1, _MAX_SAMPLES // len(paths))) for path in paths}
    except OSError as error:
        raise UnknownEncoder(f"the model's weights cannot be read: {error}") from error


def _sampled(path: Path, num_samples: int) -> str:
    """Return a digest of the file's size, its beginning, samples at equal distances, the last at its end, and samples
    of its tensors."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        parts = [str(size).encode(), file.read(_HEADER_BYTES)]
        for number in range(1, num_samples + 1):
            file.seek(max(0, size * number // num_samples - _SAMPLE_BYTES))
            parts.append(file.read(_SAMPLE_BYTES))
        for start, end in _tensors(file, size):
            file.seek(max(start, (start + end - _TENSOR_BYTES) // 2))
            parts.append(file.read(min(_TENSOR_BYTES, end - start)))
    return content_hash(b"".join(parts))


def _tensors(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Return where the tensors of a safetensors file are; of another file, nothing."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length < min(size, _MAX_HEADER_BYTES):
        return []
    try:
        header = msgspec.json.decode(file.read(length), type=dict[str, _Tensor])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    places = (tensor.data_offsets for tensor in header.values() if tensor.data_offsets is not None)
    return sorted((8 + length + start, 8 + length + end) for start, end in places if 0 <= start < end)


class _Tensor(msgspec.Struct):
    """Of a safetensors header; its `__metadata__` has no place."""

    data_offsets: tuple[int, int] | None = None
