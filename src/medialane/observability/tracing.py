"""What is told to a trace. Spans are made by whoever instruments the server (`opentelemetry-instrument`, an ASGI
middleware); without one, nothing is recorded and nothing is spent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opentelemetry import trace


def annotate(attributes: Callable[[], Mapping[str, str | int | float]]) -> None:
    """Set attributes on the current span; they are made only if it records."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attributes(dict(attributes()))
