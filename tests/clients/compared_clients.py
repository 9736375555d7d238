"""Compares what a client got from two servers.

Values and errors are equal, apart from ids and times. Streams are equal apart from how they were cut: which tokens
share an event depends on how fast the client reads.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from openai_http import assert_same

#: Besides what `assert_same` leaves out. What is cached depends on which of two workers had the last prompts.
_VOLATILE = frozenset(
    ("item_id", "call_id", "sequence_number", "noCacheTokens", "cacheReadTokens", "cachedInputTokens", "cached_tokens")
)
#: Text or lists that come in pieces, one in an event.
_PIECES = frozenset(("content", "arguments", "text", "delta", "partial_json", "reasoning", "token_ids"))
#: Which of several answers, blocks or calls an event is about.
_PLACES = ("type", "index", "output_index", "content_index")


def settled(value: Any) -> Any:
    """Without volatile fields, and with streams put together."""
    if isinstance(value, list):
        return [settled(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"stream"}:
        return _joined(settled(value["stream"]))
    return {key: settled(item) for key, item in value.items() if key not in _VOLATILE}


def _joined(events: Iterable[Any]) -> dict[str, Any]:
    """Chunks of a choice in one, by its index; other events without their pieces, repeated ones once; and the pieces of
    each place in one."""
    pieces: dict[str, list[Any]] = defaultdict(list)
    choices: dict[int, _Choice] = defaultdict(_Choice)
    others = []
    for event in events:
        match event.get("choices"):
            case [dict() as choice]:
                choices[choice.get("index", 0)].add(_emptied(event, "", pieces))
            case _:
                others.append(_emptied(event, "", pieces))
    return {
        "choices": {str(index): choices[index].joined() for index in sorted(choices)},
        "events": [event for event, _ in groupby(others)],
        "pieces": dict(pieces),
    }


class _Choice:
    """The chunks of a choice: which fields any of them has, and the values in their order, without those that each
    chunk repeats. Which chunk has a value depends on the cut: the last tokens come with the end or before it."""

    def __init__(self) -> None:
        self._common: dict[str, Any] = {}
        self._fields: set[str] = set()
        self._values: list[Any] = []

    def add(self, chunk: dict[str, Any]) -> None:
        [choice] = chunk["choices"]
        self._common.update({key: item for key, item in chunk.items() if key != "choices" and item is not None})
        self._fields.update(chunk)
        for field, value in _leaves(choice, "choice"):
            self._fields.add(field)
            if value not in (None, "") and field != "choice.index":
                self._values.append([field, value])

    def joined(self) -> dict[str, Any]:
        return {"common": self._common, "fields": sorted(self._fields), "values": self._values}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif value != {}:
        yield path, value


def _emptied(value: Any, path: str, pieces: dict[str, list[Any]]) -> Any:
    if isinstance(value, list):
        return [_emptied(item, path, pieces) for item in value]
    if not isinstance(value, dict):
        return value
    at = path + "".join(f" {key}={value[key]}" for key in _PLACES if isinstance(value.get(key), int | str))
    own = {key for key in _PIECES & value.keys() if isinstance(value[key], str | list)}
    for key in sorted(own):
        pieces[f"{at} {key}"].extend(value[key])
    emptied = {key: _emptied(item, f"{at} {key}", pieces) for key, item in value.items() if key not in own}
    # A tool call's id and name come once; the rest are pieces of its arguments, which may be in any event.
    calls = emptied.pop("tool_calls", None) or []
    named = [call for call in calls if any(item for key, item in call.items() if key != "index")]
    return {**emptied, "tool_calls": named} if named else emptied


def _without_fault(plain: Any) -> Any:
    """Without the "{}" that vLLM 0.32.0 appends to the arguments of a forced tool when their last text and the end come
    in one step (`Parser.finalize_generation`); ours keeps the steps apart."""
    if isinstance(plain, list):
        return [_without_fault(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    kept = {key: _without_fault(item) for key, item in plain.items()}
    for place, pieces in kept.get("pieces", {}).items() if "choices" in kept else ():
        if place.endswith((" arguments", " partial_json")) and pieces[-3:] == ["}", "{", "}"]:
            del pieces[-2:]
    return kept


def assert_equal(ours: Any, plain: Any, differing: Iterable[str] = ()) -> None:
    """Two outcomes of a call are equal, but for the fields of an error that are said to differ, and do."""
    ours, plain = settled(ours), _without_fault(settled(plain))
    for field in differing:
        assert ours["error"].pop(field) != plain["error"].pop(field), f"{field} does not differ"
    assert_same(ours, plain)
