"""Traces for routing benchmarks, with repeated prefixes and images. Produced by seeded generators, never stored."""

from traces.sessions import SessionTrace, Turn, session_turns

__all__ = ["SessionTrace", "Turn", "session_turns"]
