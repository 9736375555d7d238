"""Stages: in what form a request's media are handed to a worker. One row of `STAGES` each.

How that form travels is the transport, chosen separately (`transfer.ways`). A new stage is a row here, the code that
finds what it sends (`gateway.request_media`), and, where the worker has more to do than to run the engine, the code
that does it (`vllm_bridge.source_prompt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

StageName = Literal["features", "decoded", "url"]
StageChoice = Literal["auto", StageName]
TransportName = Literal["shm", "inline"]

#: What is left of an item's way to the language model. The encoder runs inside the engine.
WorkerStep = Literal["decode", "process", "encode"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One form of a request's media.

    `sends` is the kind of arena entry that is handed over, `worker_steps` what the worker still does with it.
    `transports` are those that may carry it, best first; `last_resort` carries it where the operator's choice of a
    transport is impossible at a worker. `same_processor`: it means the same only to a worker whose processor settings
    equal ours. With `--stage auto`, `instead` is tried at a worker that cannot be given this stage, `fallback` where
    handing it over failed.
    """

    name: StageName
    sends: Literal["processed", "decoded", "encoded"]
    worker_steps: tuple[WorkerStep, ...]
    transports: tuple[TransportName, ...] = ("shm", "inline")
    last_resort: tuple[TransportName, ...] = ()
    same_processor: bool = False
    instead: StageName | None = None
    fallback: StageName | None = None

    @property
    def is_processed(self) -> bool:
        """Whether items are processed by the gateway, which then expands the prompt as well."""
        return "process" not in self.worker_steps

    @property
    def is_decoded(self) -> bool:
        """Whether items are decoded by the gateway."""
        return "decode" not in self.worker_steps


STAGES: Mapping[StageName, Stage] = {
    stage.name: stage
    for stage in (
        # What is decoded means the same to every worker: the next best where features do not.
        Stage("features", "processed", ("encode",), same_processor=True, instead="decoded", fallback="url"),
        Stage("decoded", "decoded", ("process", "encode"), fallback="url"),
        # Encoded bytes are few: they go inside the message rather than not at all.
        Stage("url", "encoded", ("decode", "process", "encode"), last_resort=("inline",)),
    )
}

#: What `auto` begins with.
BEST_STAGE: StageName = "features"

#: What leaves everything to the worker: for embeddings that a client sends, and a model that takes no media.
RAW_STAGE: StageName = "url"


def prepared_stage(choice: StageChoice) -> Stage:
    """The stage that a request's media are prepared for before its worker is known."""
    return STAGES[BEST_STAGE if choice == "auto" else choice]
