"""Stages: the forms in which a request's media are sent to a worker, one row of `STAGES` each.

The transport is chosen separately (`gateway.request.handover_paths`). A new stage needs a row here, code that
provides what it sends (`gateway.request.media`), and, if the worker has to do more than run the engine, code for that
(`vllm_bridge.engine.unexpanded_prompt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

StageName = Literal["features", "decoded", "url"]
StageChoice = Literal["auto", StageName]

#: Remaining steps before the language model. The encoder runs inside the engine.
WorkerStep = Literal["decode", "process", "encode"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One form of a request's media.

    `sends` is the kind of arena entry that is sent, `worker_steps` are the steps left to the worker. What `is_small` is
    sent in messages rather than not at all if the operator's choice of a transport is impossible for a worker.
    `same_processor` requires a worker whose processor settings equal ours. With `--stage auto`, `if_unsupported` is
    used for a worker that does not support this stage, `after_failure` after a failed hand-over.
    """

    name: StageName
    sends: Literal["processed", "decoded", "encoded"]
    worker_steps: tuple[WorkerStep, ...]
    is_small: bool = False
    same_processor: bool = False
    if_unsupported: StageName | None = None
    after_failure: StageName | None = None

    @property
    def is_processed(self) -> bool:
        """Whether items are processed by the store; the gateway then expands the prompt."""
        return "process" not in self.worker_steps

    @property
    def is_decoded(self) -> bool:
        """Whether items are decoded by the store."""
        return "decode" not in self.worker_steps


STAGES: Mapping[StageName, Stage] = {
    stage.name: stage
    for stage in (
        # Decoded media do not depend on processor settings: the next best where features cannot be used.
        Stage("features", "processed", ("encode",), same_processor=True, if_unsupported="decoded", after_failure="url"),
        Stage("decoded", "decoded", ("process", "encode"), after_failure="url"),
        Stage("url", "encoded", ("decode", "process", "encode"), is_small=True),
    )
}

#: The first stage that `auto` tries.
BEST_STAGE: StageName = "features"

#: Leaves everything to the worker: for embeddings sent by a client, and for a model without media support.
RAW_STAGE: StageName = "url"


def prepared_stage(choice: StageChoice) -> Stage:
    """Return the stage for which a request's media are prepared before its worker is known."""
    return STAGES[BEST_STAGE if choice == "auto" else choice]
