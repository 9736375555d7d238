"""Fake workers whose answers follow from their prompts, behind sockets that can be cut. So each answer can be compared
with the right one, whatever happened to its worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

import msgspec

from cut_sockets import CuttableSocket
from gateway_process import AgreeingWorker, Peers, serving
from local_store import store_link
from medialane.config import Config
from medialane.store import StoreLink
from medialane.testing.simulated.sequence import FIRST_ANSWER_TOKEN, NUM_ANSWER_TOKENS, AnswerTokens
from medialane.types.request import CompletionDelta, EngineRequest, OutputDelta

#: vLLM's RequestOutputKind.
_FINAL_ONLY = 2


class _Params(msgspec.Struct, frozen=True):
    """The fields used of vLLM's SamplingParams; for the defaults see there."""

    max_tokens: int
    n: int = 1
    seed: int | None = None
    output_kind: int = 0
    detokenize: bool = True


class RightAnswers:
    """The tokens of each answer, and the `texts` of these tokens (`token_texts`)."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = texts
        tokens = range(FIRST_ANSWER_TOKEN, FIRST_ANSWER_TOKEN + NUM_ANSWER_TOKENS)
        self._excluded = frozenset(tokens) - texts.keys()

    def tokens(self, token_ids: Sequence[int], num_tokens: int, seed: int | None) -> list[int]:
        """Return the tokens that follow these. `seed` is that of the choice: the request's plus its index."""
        found = AnswerTokens(token_ids, seed=seed)
        return [found.next(self._excluded) for _ in range(num_tokens)]

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join([self._texts[token] for token in token_ids])


class AnsweringWorker(AgreeingWorker):
    """Outputs the right answers, a token of each choice after each `delay_s`."""

    def __init__(self, link: StoreLink, right: RightAnswers, *, delay_s: float, worker_id: str) -> None:
        super().__init__(link, delay_s=delay_s, worker_id=worker_id)
        self._right = right
        self._token_s = delay_s

    async def outputs(self, request: EngineRequest) -> AsyncGenerator[OutputDelta, None]:
        params = msgspec.msgpack.decode(request.sampling_params, type=_Params)
        before = [*request.prompt.token_ids, *request.generated]
        seeds = [None if params.seed is None else params.seed + index for index in range(params.n)]
        choices = [self._right.tokens(before, params.max_tokens, seed) for seed in seeds]
        is_final_only = params.output_kind == _FINAL_ONLY
        self.num_active += 1
        try:
            for number in range(params.max_tokens):
                await asyncio.sleep(self._token_s)
                is_last = number == params.max_tokens - 1
                if is_last or not is_final_only:
                    start = 0 if is_final_only else number
                    new = [tokens[start : number + 1] for tokens in choices]
                    texts = [self._right.text(tokens) if params.detokenize else "" for tokens in new]
                    yield _delta(request, new, texts, is_last=is_last)
        finally:
            self.num_active -= 1


def _delta(request: EngineRequest, choices: Sequence[list[int]], texts: Sequence[str], *, is_last: bool) -> OutputDelta:
    reason = "length" if is_last else None
    completions = [
        CompletionDelta(index, text, tokens, finish_reason=reason)
        for index, (tokens, text) in enumerate(zip(choices, texts, strict=True))
    ]
    return OutputDelta(request.request_id, completions, finished=is_last)


class CuttableWorkers:
    """Workers, one of which can be cut off: `cut_busiest`. `num_cut` counts cuts, `num_lost` the requests that were
    there, once for each cut."""

    def __init__(self, workers: Sequence[AnsweringWorker], sockets: Sequence[CuttableSocket]) -> None:
        self._workers = workers
        self._sockets = sockets
        self.num_cut = self.num_lost = 0

    def cut_busiest(self, down_s: float) -> None:
        worker, socket = max(zip(self._workers, self._sockets, strict=True), key=lambda pair: pair[0].num_active)
        self.num_cut += 1
        self.num_lost += worker.num_active
        socket.cut(down_s)


@contextlib.asynccontextmanager
async def cuttable_workers(
    peers: Peers, config: Config, right: RightAnswers, *, delay_s: float
) -> AsyncIterator[CuttableWorkers]:
    async with contextlib.AsyncExitStack() as stack:
        link = await stack.enter_async_context(store_link(peers.store, directory=config.arena.directory))
        workers: list[AnsweringWorker] = []
        sockets: list[CuttableSocket] = []
        for address in peers.workers:
            workers.append(AnsweringWorker(link, right, delay_s=delay_s, worker_id=f"worker {len(workers)}"))
            target = f"{address}.own"
            await stack.enter_async_context(serving(workers[-1], target))
            sockets.append(CuttableSocket(address.removeprefix("unix://"), target.removeprefix("unix://")))
            await stack.enter_async_context(sockets[-1].listening())
        yield CuttableWorkers(workers, sockets)
