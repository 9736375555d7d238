"""vLLM's command line."""

from __future__ import annotations

from argparse import Action

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parser_groups(parser: FlexibleArgumentParser) -> list[tuple[str, list[Action]]]:
    """Return the titles and actions of a parser's groups; argparse has no public interface for that."""
    return [(group.title, group._group_actions) for group in parser._action_groups]
