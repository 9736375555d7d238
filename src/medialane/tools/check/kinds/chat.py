"""Chat completions: text, each modality alone and mixed, repeats, sizes, documents, options, streams and refusals.

Each case is about something that preparing media one by one, caching them, or assembling prompts from their sizes can
get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations
from typing import Any

from medialane.tools.check.case import Answer, Case, CaseRequest, EndpointKind, Limits, Part
from medialane.tools.check.media import (
    MAX_REFUSED_ITEMS,
    MODALITIES,
    ONE,
    OTHER,
    audio,
    damaged,
    document,
    image,
    image_in_mode,
    input_audio,
    small,
    text,
    video,
)

PATH = "/v1/chat/completions"
_MAX_TOKENS = 12
_ASK = text("What do you make of it?")
#: Options of the processors of some family each; a model without the option is not affected, or refuses it.
_OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "image": (
        {"min_pixels": 3136, "max_pixels": 50176},
        {"size": {"shortest_edge": 3136, "longest_edge": 50176}},
        {"max_soft_tokens": 70},
        {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 64, "pan_and_scan_min_ratio_to_activate": 1.0},
        {"crop_to_patches": True, "min_patches": 2, "max_patches": 4},
        {"max_slice_nums": 2},
    ),
    "video": ({"fps": 1}, {"num_frames": 4}, {"do_sample_frames": True, "fps": 2}),
    "audio": (),
}


def ask(parts: list[Part]) -> CaseRequest:
    return chat(*parts)


def chat(*parts: Part, **options: Any) -> CaseRequest:
    """Return a greedy chat completion that shows token ids and logprobs."""
    return conversation({"role": "user", "content": list(parts)}, **options)


def conversation(*messages: dict[str, Any], **options: Any) -> CaseRequest:
    body = {
        "messages": list(messages),
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        **options,
    }
    return CaseRequest(PATH, body)


def cases(limits: Limits) -> Iterator[Case]:
    yield Case("text only", lambda: chat(text("Say something about pictures.")), is_essential=True)
    yield Case("text only, streaming", lambda: _streaming(text("Say something about rivers.")))
    for modality in MODALITIES:
        if modality in limits:
            yield from _usual(modality, limits[modality])
            yield from _PARTICULAR[modality](limits[modality])
            yield from _options(modality)
        else:
            yield Case(
                f"{modality}, which the model has not", partial(_with, ONE[modality]), is_essential=modality == "audio"
            )
    yield from _mixed(limits)
    yield from _sampling(limits)


def _with(*makers: Callable[[], Part] | Part, **options: Any) -> CaseRequest:
    """Return a request of parts and of functions that make parts, and a question."""
    return chat(*(maker() if callable(maker) else maker for maker in makers), _ASK, **options)


def _streaming(*parts: Part) -> CaseRequest:
    return chat(*parts, stream=True, stream_options={"include_usage": True})


def _usual(modality: str, limit: int) -> Iterator[Case]:
    """The cases of every modality."""
    one, other = ONE[modality], OTHER[modality]
    yield Case(f"one {modality}", partial(_with, one), is_essential=True)
    yield Case(f"another {modality}", partial(_with, other), varies=f"one {modality}", is_essential=True)
    yield Case(
        f"{modality} between texts", lambda: chat(text("Look at"), other(), text("and say it.")), is_essential=True
    )
    yield Case(f"{modality} alone", lambda: chat(one()))
    yield Case(f"{modality} again, in another prompt", lambda: chat(text("Once more:"), one(), text("Well?")))
    yield Case(f"{modality} again, the same prompt", partial(_with, one), is_essential=True)
    yield Case(f"{modality}, streaming", lambda: _streaming(other(), text("And now?")), is_essential=True)
    yield Case(f"{modality} in the second turn", partial(_second_turn, other))
    yield Case(f"{modality} that is damaged", lambda: chat(damaged(modality), _ASK), is_essential=True)
    if limit >= 2:
        yield Case(f"two of {modality}", partial(_with, one, text("and"), other), is_essential=True)
        yield Case(f"two of {modality}, the other order", partial(_with, other, one))
        yield Case(f"the same {modality} twice", partial(_with, one, text("and"), one), is_essential=True)
        yield Case(f"{modality} in two turns", partial(_two_turns, one, other))
    if limit >= 3:
        yield Case(f"three of {modality}", partial(_with, other, one, text("and"), other))
    if limit <= MAX_REFUSED_ITEMS:
        yield Case(
            f"more of {modality} than the limit", lambda: chat(*[small(modality)] * (limit + 1)), is_essential=True
        )


def _second_turn(make: Callable[[], Part]) -> CaseRequest:
    return conversation(
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [make(), _ASK]},
    )


def _two_turns(one: Callable[[], Part], other: Callable[[], Part]) -> CaseRequest:
    return conversation(
        {"role": "user", "content": [one(), _ASK]},
        {"role": "assistant", "content": "It is what it is."},
        {"role": "user", "content": [text("And"), other()]},
    )


def _images(limit: int) -> Iterator[Case]:
    sizes = {
        "one pixel": (1, 1),
        "tiny": (11, 7),
        "odd": (57, 31),
        "tall": (60, 660),
        "wide": (1000, 90),
        "large": (1600, 1200),
    }
    for name, (width, height) in sizes.items():
        yield Case(
            f"image, {name} ({width}x{height})",
            partial(_with, partial(image, 4, width, height)),
            is_essential=name == "odd",
        )
    for name, mode in {"transparent": "RGBA", "grey": "L", "palette": "P"}.items():
        yield Case(f"image, {name} PNG", partial(_with, partial(image_in_mode, 5, mode)))
    yield from _documents(min(limit, 2))


def _documents(num_pages: int) -> Iterator[Case]:
    """Plain vLLM is sent their pages (`without_documents`)."""
    one = partial(document, 1, num_pages)
    yield Case("document", partial(_with, one), is_essential=True)
    yield Case("document again, in another prompt", lambda: chat(text("Once more:"), one(), text("Well?")))
    yield Case("document, streaming", lambda: _streaming(document(2, num_pages), text("And now?")))
    yield Case("document without its text", partial(_with, partial(document, 1, num_pages, text="none")))
    yield Case("document, one page of two", partial(_with, partial(document, 3, 2, pages="2")), is_essential=True)


def _videos(_limit: int) -> Iterator[Case]:
    yield Case("video, long", lambda: chat(text("Look at"), video(4, 150, 160, 120, fps=25)), is_essential=True)
    yield Case("video, one frame", partial(_with, partial(video, 5, 1)))
    yield Case("video, three frames", partial(_with, partial(video, 6, 3)))
    yield Case("video, tall", partial(_with, partial(video, 7, 16, 64, 320)))
    yield Case("video, one frame per second", partial(_with, partial(video, 8, 12, fps=1)))
    yield Case(
        "video, four frames asked for",
        partial(_with, ONE["video"], media_io_kwargs={"video": {"num_frames": 4}}),
        varies="one video",
    )


def _audio_clips(limit: int) -> Iterator[Case]:
    yield Case("audio, 34 s", partial(_with, partial(audio, 330, 34)), is_essential=True)
    yield Case("audio, 0.1 s", partial(_with, partial(audio, 700, 0.1)), is_essential=True)
    yield Case(
        "audio, 44.1 kHz stereo", lambda: chat(text("Hear"), audio(620, 2.3, rate=44100, channels=2)), is_essential=True
    )
    yield Case("audio, 8 kHz FLAC", partial(_with, partial(audio, 250, 2, rate=8000, container="FLAC")))
    yield Case("audio, input_audio", partial(_with, partial(input_audio, 500, 2)))
    if limit >= 2:
        yield Case("audio, 34 s and 0.5 s", partial(_with, partial(audio, 330, 34), partial(audio, 600, 0.5)))


_PARTICULAR: dict[str, Callable[[int], Iterator[Case]]] = {"image": _images, "video": _videos, "audio": _audio_clips}


def _options(modality: str) -> Iterator[Case]:
    for options in _OPTIONS[modality]:
        yield Case(
            f"{modality}, {', '.join(options)}",
            partial(_with, ONE[modality], mm_processor_kwargs=options),
            varies=f"one {modality}",
        )


def _mixed(limits: Limits) -> Iterator[Case]:
    kinds = [modality for modality in MODALITIES if modality in limits]
    for one, other in permutations(kinds, 2):
        yield Case(
            f"{one}, then {other}", partial(_with, ONE[one], text("and"), OTHER[other]), is_essential=len(kinds) == 2
        )
    if len(kinds) > 2:
        for order in (kinds, kinds[::-1]):
            yield Case(", ".join(order), partial(_with, *(ONE[kind] for kind in order)), is_essential=True)
        twice = [kind for kind in kinds if limits[kind] > 1]
        several = [OTHER[kind] for kind in kinds] + [ONE[kind] for kind in twice]
        yield Case("several of each modality", partial(_with, *several), is_essential=True)


def _sampling(limits: Limits) -> Iterator[Case]:
    parts = [ONE[modality] for modality in MODALITIES if modality in limits][:1]
    yield Case("n=2, greedy", partial(_with, *parts, n=2))
    yield Case("n=2, sampled with a seed", partial(_with, *parts, n=2, temperature=0.8, seed=7), is_essential=True)
    yield Case("stop at a word", partial(_with, *parts, stop=["e"], max_tokens=20))
    yield Case("prompt longer than the model's context", lambda: chat(text("word " * 300_000)))


def compared(answer: Answer) -> Any:
    """Return the completion, also if it was streamed, in pieces that differ from server to server."""
    return _joined(answer.events) if answer.events else answer.document


def _joined(events: tuple[Any, ...]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    joined: dict[str, Any] = {"choices": choices}
    for event in events:
        joined |= {name: event[name] for name in ("error", "usage", "prompt_token_ids") if event.get(name) is not None}
        for choice in event.get("choices", ()):
            _add(choices.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": []}), choice)
    return joined


def _add(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {})
    whole["text"] += (delta.get("reasoning") or "") + (delta.get("content") or "")
    whole["token_ids"] += choice.get("token_ids") or []
    whole["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
    whole["finish_reason"] = choice.get("finish_reason") or whole.get("finish_reason")


CHAT = EndpointKind("chat", PATH, cases, ask=ask, compared=compared)
