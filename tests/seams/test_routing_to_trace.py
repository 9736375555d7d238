"""Routing attributes of a request's trace, with a tracer of OpenTelemetry's SDK."""

from __future__ import annotations

import pytest
from gateway_parts import Parts, png, prompt
from opentelemetry.sdk.trace import TracerProvider

from medialane.gateway import open_scope


@pytest.fixture
def tracer():
    provider = TracerProvider()
    yield provider.get_tracer("test")
    provider.shutdown()


async def test_decision_and_outcome_are_attributes_of_the_request_span(arena, preparers, worker, tracer):
    async with Parts(arena, preparers, [worker]) as parts:
        with tracer.start_as_current_span("request") as span, open_scope():
            await parts.answer(prompt(png(seed=1)))
    attributes = {name.removeprefix("medialane.routing."): value for name, value in span.attributes.items()}
    assert attributes["reason"] == "the only candidate"
    assert attributes["policy"] == "cost"
    assert (attributes["rank"], attributes["cached_tokens"]) == (0, 0)
    assert attributes["num_tokens"] > 0
    assert attributes["expected_ms"] > 0
    assert worker.address in attributes["worker"]
