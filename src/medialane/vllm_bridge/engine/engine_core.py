"""Our changes to an EngineCore process: its decoder, and utilities that the front end calls by name.

Utilities run between two steps, in EngineCore's main thread. If they are missing (VLLM_PLUGINS excludes us, or vLLM has
changed), calling them fails, and features are sent in the message instead.

Two of them try the model's encoder with one small item of each modality at start, in each process that runs the model,
since its family does not say what it supports. *Kept embeddings* (`measure`): the output must have one row per token of
the item's placeholder that needs an embedding, and a prompt must have the same rotary positions if the item has only
its small fields, which are all that an engine gets of an item whose embedding is loaded. *Clients' embeddings*
(`try_embeds`): Gemma-3's parser asserts that there are none, Pixtral-HF's declares the field and its model raises,
which would end the engine. So the output for an item is given back to the model, in each form that we can check in
requests: it is accepted if the model returns exactly that.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from msgspec.structs import astuple
from vllm.platforms import current_platform

from medialane.runtime.linux import signal_on_parent_death
from medialane.types.errors import InvalidEmbeds, InvalidFeature, PreparationFailed
from medialane.types.tensor import UNNAMED
from medialane.vllm_bridge.engine.embedding_connector import EmbeddingConnector
from medialane.vllm_bridge.engine.engine_embeddings import Measured
from medialane.vllm_bridge.engine.unexpanded_prompt import GRID, MODALITY, VALUES, AcceptedEmbeds
from medialane.vllm_bridge.items.arena_tensors import RESOLVER, ArenaDecoder, Unreadable
from medialane.vllm_bridge.items.features import decode_small_fields, encode_item, spec_of
from medialane.vllm_bridge.seams import engine_core
from medialane.vllm_bridge.seams.encoder_cache import WorkerEncoder, connector_of, on_every_rank, only_encodes
from medialane.vllm_bridge.seams.engine import EngineCoreRequest
from medialane.vllm_bridge.seams.kv_transfer import yield_cores

T = TypeVar("T")


def install() -> None:
    """Patch EngineCore in this process, or before it is forked from it. Idempotent."""
    if current_platform.is_cpu():
        yield_cores()
    engine_core.correct_transfers()
    engine_core.report_phases()
    engine_core.use_socket_folder()
    engine_core.change(
        ArenaDecoder,
        before_add=_refuse_unreadable,
        utilities={
            "medialane_attach": _attach,
            "medialane_detach": lambda _engine, arena: RESOLVER.detach(arena),
            "medialane_refused": lambda _engine, request_id: RESOLVER.has_refused(request_id),
            "medialane_die_with": _die_with,
            "medialane_attach_ranks": lambda engine, arena, directory, nonce: all(
                on_every_rank(engine, _attach, arena, directory, nonce)
            ),
            "medialane_detach_ranks": lambda engine, arena: on_every_rank(engine, _detach, arena),
            "medialane_encoder": lambda engine: on_every_rank(engine, measure),
            "medialane_try_embeds": lambda engine: on_every_rank(engine, try_embeds),
            "medialane_embeddings": lambda engine: _embeddings(engine, lambda c: astuple(c.schedule.counts)),
            "medialane_drop_fills": lambda engine: _embeddings(engine, lambda c: c.schedule.drop_fills()),
        },
    )


def _refuse_unreadable(request: EngineCoreRequest) -> None:
    if isinstance(request.mm_features, Unreadable):
        RESOLVER.refuse(request.external_req_id or request.request_id)
        raise InvalidFeature("the features could not be read from the arena")


def _attach(process: Any, arena: str, directory: str, nonce: str) -> bool:
    """In EngineCore, and in the processes that run the model, unless that is EngineCore's own."""
    return RESOLVER.attach(arena, directory, nonce, pin=not only_encodes(process))


def _detach(_worker: Any, arena: str) -> None:
    RESOLVER.detach(arena)


def _embeddings(engine: Any, use: Callable[[EmbeddingConnector], T]) -> T | None:
    """Return what `use` returns for the scheduler's embeddings; None if it has none."""
    connector = connector_of(engine)
    return use(connector) if isinstance(connector, EmbeddingConnector) else None


def _die_with(_engine: Any, pid: int) -> bool:
    """Exit when the front end does. vLLM's own EngineCore survives a SIGKILL of its parent and keeps the device."""
    return os.getppid() == pid and signal_on_parent_death(signal.SIGKILL, parent_pid=pid)


def measure(worker: Any, encoder_of: Callable[[Any], WorkerEncoder] = WorkerEncoder) -> Measured:
    """Return the measurements of this process, which `worker` is. Never raises: an engine works without kept
    embeddings, and its card says why it keeps none (whatever the model raised, out of memory included)."""
    measured: Measured = {"widths": {}, "dtypes": {}, "faults": {}}
    try:
        encoder = encoder_of(worker)
        samples = encoder.sample_inputs()
    except Exception as error:  # noqa: BLE001 - the model's own code may raise anything
        measured["faults"]["media"] = _reason(error)
        return measured
    for modality, sample in samples.items():
        try:
            spec = _measured(encoder, modality, sample)
        except Exception as error:  # noqa: BLE001 - as above
            measured["faults"][modality] = _reason(error)
        else:
            measured["widths"][modality], measured["dtypes"][modality] = spec
    return measured


def _measured(encoder: WorkerEncoder, modality: str, sample: Any) -> tuple[int, str]:
    """Return width and dtype. Raises PreparationFailed, or whatever the model raises."""
    (item,), (place,) = sample["mm_kwargs"][modality], sample["mm_placeholders"][modality]
    small = decode_small_fields(encode_item(item)[0])
    token_ids = sample["prompt_token_ids"]
    whole, reduced = (
        encoder.mrope_positions(token_ids, modality=modality, item=each, place=place) for each in (item, small)
    )
    if whole != reduced:
        raise PreparationFailed("rotary positions depend on the item's large fields")
    spec = spec_of(encoder.embeddings_of(modality, item))
    if len(spec.shape) != 2 or spec.shape[0] != place.get_num_embeds():
        raise PreparationFailed(f"the encoder's output is {spec.shape} for {place.get_num_embeds()} tokens")
    return spec.shape[1], spec.dtype


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def try_embeds(worker: Any, encoder_of: Callable[[Any], WorkerEncoder] = WorkerEncoder) -> AcceptedEmbeds:
    """Return in which form this process, which `worker` is, accepts embeddings of images. Never raises:
    an engine works without them."""
    faults = {}
    for fields in ([VALUES, GRID], [UNNAMED]):
        try:
            return AcceptedEmbeds(fields=fields, width=_tried(encoder_of(worker), fields), fault="")
        except Exception as error:  # noqa: BLE001 - the model's own code; the reason is logged by the caller
            faults["object" if GRID in fields else "tensor"] = _reason(error)
    fault = "; ".join(f"as one {form}: {why}" for form, why in faults.items())
    return AcceptedEmbeds(fields=[], width=0, fault=fault)


def _tried(encoder: WorkerEncoder, fields: list[str]) -> int:
    """Return the width of embeddings. Raises InvalidEmbeds, or whatever the model raises."""
    sample = encoder.sample_inputs()[MODALITY]
    (item,), (place,) = sample["mm_kwargs"][MODALITY], sample["mm_placeholders"][MODALITY]
    values = encoder.embeddings_of(MODALITY, item).cpu()
    given: Any = {VALUES: values, GRID: item[GRID].data} if GRID in fields else values
    rendered = encoder.sample_of_embeds(MODALITY, given)
    (item,), (place,) = rendered["mm_kwargs"][MODALITY], rendered["mm_placeholders"][MODALITY]
    if tuple(item[VALUES].data.shape) != (place.get_num_embeds(), values.shape[-1]):
        raise InvalidEmbeds(f"the placeholder has {place.get_num_embeds()} tokens for {len(values)} embeddings")
    encoder.mrope_positions(rendered["prompt_token_ids"], modality=MODALITY, item=item, place=place)
    if not torch.equal(encoder.embeddings_of(MODALITY, item).cpu(), values):
        raise InvalidEmbeds("the model changes them")
    return int(values.shape[-1])
