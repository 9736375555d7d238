"""Traces for routing: requests that have what routing lives on. Made by seeded generators, never stored."""

from traces.sessions import SessionTrace, Turn, session_turns

__all__ = ["SessionTrace", "Turn", "session_turns"]
