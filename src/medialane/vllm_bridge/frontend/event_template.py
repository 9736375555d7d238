"""The events of a stream from a template, without vLLM's pydantic models for each token.

Theory of operation. vLLM's generator turns the results of a request into events, most of which differ from each other
in their text alone. Its event for the first such result is the *template* of the next ones: they are made here, and
their results never reach it. It waits at its `yield` meanwhile. The next result of any other kind, which is mostly the
last one, goes to it, with the tokens that it has not had, since it counts them. So vLLM makes every first and last
event, usage, errors and logs; a request with an option that may change the events between is left to it altogether.

Events that are ready together are sent together: the first text with the role, texts whose outputs have arrived while
this process was busy, the end of the stream with the last text.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from operator import itemgetter
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json
from vllm.outputs import RequestOutput

from medialane.vllm_bridge.frontend.request_backend import Generation
from medialane.vllm_bridge.seams.api_server import Events, make_streams_by
from medialane.vllm_bridge.seams.probe import installed_version
from medialane.vllm_bridge.seams.table import TESTED_VLLM

logger = logging.getLogger(__name__)

#: Options of requests with any value: they change which tokens come, or nothing behind the first event. Every other
#: option must be null, false, or have its default.
_ANY_VALUE = frozenset(
    (
        "model", "messages", "prompt", "stream", "stream_options", "user", "request_id", "session_id", "priority",
        "cache_salt", "vllm_xargs", "max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids",
        "include_stop_str_in_output", "ignore_eos", "temperature", "top_p", "top_k", "min_p", "seed",
        "frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty", "logit_bias",
        "allowed_token_ids", "bad_words", "response_format", "structured_outputs", "skip_special_tokens",
        "spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side", "add_special_tokens",
        "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "documents",
        "reasoning_effort", "media_io_kwargs", "mm_processor_kwargs",
    )
)  # fmt: skip


def install(state: Any, backend: Generation) -> None:
    """Make the streams of the app of this `state` so, with the vLLM for which tests compare all bytes."""
    if (found := installed_version()) != TESTED_VLLM:
        logger.warning("vLLM %s makes every event of a stream: templates are tested with %s only", found, TESTED_VLLM)
        return
    made = partial(stream, has_next=backend.has_next)
    make_streams_by(
        state,
        chat=partial(made, key='"delta":{"content":'),
        completions=partial(made, key='"text":', output_of=itemgetter(1)),
    )


def stream(
    request: BaseModel,
    results: AsyncIterator[Any],
    make: Callable[[AsyncIterator[Any]], Events],
    *,
    has_next: Callable[[], bool],
    key: str,
    output_of: Callable[[Any], RequestOutput] = lambda result: result,
) -> Events:
    """Return the events of `make(results)`, vLLM's generator, with the same bytes. `has_next` returns whether the next
    result can be had without waiting; `key` precedes the text in an event; `output_of` returns vLLM's output in a
    result."""
    if not has_plain_events(request):
        return make(results)
    remaining = _Results(results, output_of)
    return _templated(remaining, make(remaining), key, has_next)


def has_plain_events(request: BaseModel) -> bool:
    """Return whether the events of a request's outputs differ in their text alone, but for the last one."""
    values, fields = vars(request), type(request).model_fields
    options = values["stream_options"]
    if options is not None and options.continuous_usage_stats:
        return False
    for name in request.model_fields_set - _ANY_VALUE:
        value = values.get(name, ...)
        is_off = value is None or value is False  # by identity: 0 log probabilities are some
        if not is_off and (name not in fields or value != fields[name].get_default(call_default_factory=True)):
            return False
    return True


async def _templated(
    results: _Results, vllms: Events, key: str, has_next: Callable[[], bool]
) -> AsyncGenerator[str, None]:
    async with aclosing(vllms):
        held = ""
        async for event in vllms:
            is_alone = not held
            held += event
            head, found, tail = ("", "", "") if results.text is None else event.partition(key + results.text)
            if not found and (results.is_last or (results.text is not None and is_alone)):
                continue  # the next one follows at once: the text behind the role, the end behind the last text
            if not found or not has_next():
                yield held
                held = ""
            while found and (text := await results.next_text()) is not None:
                held += f"{head}{key}{text}{tail}"
                if not has_next():
                    yield held
                    held = ""
        if held:
            yield held


class _Results:
    """The results of a request for which vLLM's generator makes the events."""

    def __init__(self, results: AsyncIterator[Any], output_of: Callable[[Any], RequestOutput]) -> None:
        #: Of the latest result: its text in JSON, if its event can be a template, and whether it is the last one.
        self.text: str | None = None
        self.is_last = False
        self._results = results
        self._output_of = output_of
        self._next: Any = None
        self._error: Exception | None = None
        #: Of results that vLLM's generator has not had.
        self._token_ids: list[int] = []

    def __aiter__(self) -> _Results:
        return self

    async def __anext__(self) -> Any:
        self.text = None
        if self._error is not None:
            raise self._error
        result, self._next = self._next, None
        if result is None:
            result = await anext(self._results)
            self.text = _plain_text(self._output_of(result))
        output = self._output_of(result)
        self.is_last = output.finished
        if self._token_ids and output.outputs:
            output.outputs[0].token_ids = [*self._token_ids, *output.outputs[0].token_ids]
            self._token_ids = []
        return result

    async def next_text(self) -> str | None:
        """Wait for the next result. Return its text in JSON; or None, if vLLM's generator has to make its event, or how
        the results end."""
        try:
            result = await anext(self._results)
        except Exception as error:  # noqa: BLE001 - any, StopAsyncIteration too: raised in vLLM's generator instead
            self._error = error
            return None
        output = self._output_of(result)
        text = _plain_text(output)
        if text is None:
            self._next = result
        else:
            self._token_ids += output.outputs[0].token_ids
        return text


def _plain_text(output: RequestOutput) -> str | None:
    """Return the text of an output in JSON, by vLLM's serializer; None if its event has more than text."""
    if len(output.outputs) != 1:
        return None
    completion = output.outputs[0]
    if completion.finish_reason is not None or completion.index or not completion.token_ids:
        return None
    try:
        return to_json(completion.text).decode()
    except PydanticSerializationError:  # half of a surrogate pair: vLLM's generator ends the stream with an error
        return None
