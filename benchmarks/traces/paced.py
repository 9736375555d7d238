"""Documents, or chats, of which one request after the other asks: no request is sent before the one before has ended.

All prompts begin with one system prompt. Each round has a request about each document, in the same order, which is the
hardest for a cache that evicts what was used last: documents that do not fit are always evicted before they are used
again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from medialane.testing.simulated.sequence import answer_of
from traces.sessions import Turn

_FIRST_WORD, _NUM_WORDS = 1000, 100_000


class PacedTrace(NamedTuple):
    """Parameters of a trace. Lengths are tokens. With `is_chat`, a request repeats earlier questions and answers about
    its document. After `num_rounds` rounds other documents follow, `num_sets` times in all."""

    num_documents: int = 12
    system_prompt: int = 200
    document: tuple[int, int] = (3000, 5000)
    question: tuple[int, int] = (20, 60)
    answer: tuple[int, int] = (20, 60)
    is_chat: bool = False
    num_rounds: int = 5
    num_sets: int = 1
    pace_s: float = 2.0
    seed: int = 0


def paced_turns(trace: PacedTrace) -> Iterator[Turn]:
    """Yield the trace's requests in the order of their times. Deterministic for a trace."""
    drawn = random.Random(trace.seed)

    def words(least: int, most: int) -> list[int]:
        return [_FIRST_WORD + drawn.randrange(_NUM_WORDS) for _ in range(drawn.randint(least, most))]

    system_prompt, time_s = words(trace.system_prompt, trace.system_prompt), 0.0
    for number in range(trace.num_sets):
        prompts = [system_prompt + words(*trace.document) for _ in range(trace.num_documents)]
        for _ in range(trace.num_rounds):
            for document, prompt in enumerate(prompts):
                time_s += trace.pace_s
                asked, num_answer_tokens = prompt + words(*trace.question), drawn.randint(*trace.answer)
                yield Turn(time_s, f"{number}.{document}", asked, (), num_answer_tokens)
                if trace.is_chat:
                    prompts[document] = asked + answer_of(asked, num_answer_tokens)
