"""Traces for routing benchmarks, with repeated prefixes and images. Produced by seeded generators, never stored."""

from traces.paced import PacedTrace, paced_turns
from traces.sessions import IMAGE_TOKEN, SessionTrace, Turn, session_turns

__all__ = ["IMAGE_TOKEN", "PacedTrace", "SessionTrace", "Turn", "paced_turns", "session_turns"]
