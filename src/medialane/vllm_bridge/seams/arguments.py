"""vLLM's command line."""

from __future__ import annotations

from argparse import Action

from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ModuleNotFoundError:  # moved by vLLM 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args

__all__ = ["FlexibleArgumentParser", "make_arg_parser", "parser_actions", "validate_parsed_serve_args"]


def parser_actions(parser: FlexibleArgumentParser) -> list[Action]:
    """Return all actions of a parser; argparse has no public interface for that."""
    actions: list[Action] = parser._actions
    return actions
