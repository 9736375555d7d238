"""Compares what a client got from two servers.

Values and errors are equal, apart from ids and times. Streams are equal apart from how they were cut: which tokens
share an event depends on how fast the client reads.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby, pairwise
from typing import Any

from openai_http import assert_same

#: Besides what `assert_same` leaves out.
_VOLATILE = frozenset(("item_id", "call_id", "sequence_number"))
#: Text or lists of which an event has a piece.
_PIECES = frozenset(("content", "arguments", "text", "delta", "partial_json", "reasoning", "token_ids"))
#: What only the last event of a choice has.
_END = frozenset(("finish_reason", "stop_reason"))
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
    """The events without their pieces, repeated ones once; and the pieces of each place in one."""
    pieces: dict[str, list[Any]] = defaultdict(list)
    emptied = [_emptied(event, "", pieces) for event in sorted(events, key=_choice)]
    found = [event for event, _ in groupby(emptied)]
    kept = [event for event, following in pairwise([*found, {}]) if not _is_part_of(event, following)]
    return {"events": kept, "pieces": dict(pieces)}


def _is_part_of(event: Any, following: Any) -> bool:
    """Whether `following`, the end of the same choice, has all of an event that had only pieces: the last tokens come
    with the end or just before it."""
    match event.get("choices"), following.get("choices"):
        case [[dict() as choice], [dict() as end]] if (
            choice.get("finish_reason", "") is None and event.keys() <= following.keys()
        ):
            return {**choice, **{key: end[key] for key in _END & end.keys()}} == end
    return False


def _choice(event: Any) -> int:
    """Events of several answers of one request come in any order; the last ones are about all."""
    choices = event.get("choices")
    return choices[0].get("index", 0) if choices else 0 if choices is None else 1000


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


def assert_equal(ours: Any, plain: Any, differing: Iterable[str] = ()) -> None:
    """Two outcomes of a call are equal, but for the fields of an error that are said to differ, and do."""
    ours, plain = settled(ours), settled(plain)
    for field in differing:
        assert ours["error"].pop(field) != plain["error"].pop(field), f"{field} does not differ"
    assert_same(ours, plain)
