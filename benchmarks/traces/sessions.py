"""Multi-turn sessions about images.

Session starts are a Poisson process. Each session has one of a few system prompts, with Zipf-distributed popularity,
then questions about 0 to 4 images from one pool, again Zipf-distributed, so that a few are hot. A follow-up is the
whole conversation so far, including the response, and one more question, sometimes with one more image.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from medialane.testing.simulated.sequence import answer_of
from medialane.types.feature import MediaSpan

#: Placeholder of an image in a prompt; ids of words are above.
IMAGE_TOKEN = 50
_FIRST_WORD, _NUM_WORDS = 1000, 100_000


class Turn(NamedTuple):
    """One request: its time, its session, its prompt, and the length of its response."""

    time_s: float
    session: str
    token_ids: list[int]
    media: tuple[MediaSpan, ...]
    num_answer_tokens: int


class SessionTrace(NamedTuple):
    """Parameters of a trace. Lengths are tokens; `rate_per_s` counts requests, not sessions."""

    rate_per_s: float = 20.0
    num_turns: int = 2000
    seed: int = 0
    num_system_prompts: int = 12
    system_prompt: tuple[int, int] = (200, 1500)
    num_images: int = 2000
    image: tuple[int, int] = (256, 1300)
    zipf: float = 1.0
    images_of_first: Sequence[float] = (0.2, 0.4, 0.2, 0.1, 0.1)
    more_images: float = 0.15
    question: tuple[int, int] = (15, 150)
    answer: tuple[int, int] = (30, 200)
    mean_turns: float = 4.0
    max_turns: int = 12
    least_pause_s: float = 4.0
    mean_think_s: float = 12.0


def session_turns(trace: SessionTrace) -> Iterator[Turn]:
    """Yield the trace's requests in the order of their times. Deterministic for a trace."""
    drawn = _Drawn(trace)
    begins = itertools.accumulate(iter(lambda: drawn.random.expovariate(trace.rate_per_s / trace.mean_turns), None))
    waiting: list[tuple[float, int, _Session]] = []
    numbers = itertools.count()
    next_begin = next(begins)
    for _ in range(trace.num_turns):
        while not waiting or next_begin < waiting[0][0]:
            number = next(numbers)
            heapq.heappush(waiting, (next_begin, number, _Session(f"s{number}", drawn)))
            next_begin = next(begins)
        time_s, number, session = heapq.heappop(waiting)
        yield session.turn(time_s)
        if session.goes_on():
            heapq.heappush(waiting, (time_s + session.pause_s(), number, session))


class _Drawn:
    """Values shared by all sessions."""

    def __init__(self, trace: SessionTrace) -> None:
        self.trace = trace
        self.random = random.Random(trace.seed)
        self.prompts = [self.words(*trace.system_prompt) for _ in range(trace.num_system_prompts)]
        self.images = [
            (f"{self.random.getrandbits(256):064x}", self.random.randint(*trace.image)) for _ in range(trace.num_images)
        ]
        self._prompt_weights = _zipf(trace.num_system_prompts, trace.zipf)
        self._image_weights = _zipf(trace.num_images, trace.zipf)

    def words(self, least: int, most: int) -> list[int]:
        return [_FIRST_WORD + self.random.randrange(_NUM_WORDS) for _ in range(self.random.randint(least, most))]

    def prompt(self) -> list[int]:
        return self.random.choices(self.prompts, cum_weights=self._prompt_weights)[0]

    def some_images(self, count: int) -> list[tuple[str, int]]:
        return self.random.choices(self.images, cum_weights=self._image_weights, k=count)


class _Session:
    def __init__(self, name: str, drawn: _Drawn) -> None:
        self._name = name
        self._drawn = drawn
        self._tokens = list(drawn.prompt())
        self._media: list[MediaSpan] = []
        self._num_turns = 0

    def turn(self, time_s: float) -> Turn:
        trace, drawn = self._drawn.trace, self._drawn
        if self._num_turns:
            count = int(drawn.random.random() < trace.more_images)
        else:
            count = drawn.random.choices(range(len(trace.images_of_first)), trace.images_of_first)[0]
        self._num_turns += 1
        for mm_hash, length in drawn.some_images(count):
            self._media.append(MediaSpan(mm_hash, len(self._tokens), length, "image", length))
            self._tokens += [IMAGE_TOKEN] * length + drawn.words(1, 4)
        self._tokens += drawn.words(*trace.question)
        num_answer_tokens = drawn.random.randint(*trace.answer)
        turn = Turn(time_s, self._name, list(self._tokens), tuple(self._media), num_answer_tokens)
        self._tokens += answer_of(self._tokens, num_answer_tokens, [span.mm_hash for span in self._media])
        return turn

    def goes_on(self) -> bool:
        trace = self._drawn.trace
        return self._num_turns < trace.max_turns and self._drawn.random.random() >= 1 / trace.mean_turns

    def pause_s(self) -> float:
        """Return the time for reading and typing; never less than a response takes."""
        return self._drawn.trace.least_pause_s + self._drawn.random.expovariate(1 / self._drawn.trace.mean_think_s)


def _zipf(count: int, exponent: float) -> list[float]:
    return list(itertools.accumulate(1 / rank**exponent for rank in range(1, count + 1)))
