"""vLLM's command line."""

from __future__ import annotations

from argparse import Action

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parser_actions(parser: FlexibleArgumentParser) -> list[Action]:
    """Return all actions of a parser; argparse has no public interface for that."""
    found: list[Action] = parser._actions
    return found
