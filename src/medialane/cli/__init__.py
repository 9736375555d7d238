"""The command `medialane`. Importing this loads the standard library alone: a subcommand loads the rest."""

from medialane.cli.main import COMMANDS, ERROR_PREFIX, main, parse_words

__all__ = ["COMMANDS", "ERROR_PREFIX", "main", "parse_words"]
