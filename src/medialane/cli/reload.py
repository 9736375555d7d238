"""`medialane reload`: has the gateways of a port read their settings again."""

from __future__ import annotations

import argparse
import asyncio

from medialane.cli.gateway_admin import KEY_HELP, add_gateway, connected
from medialane.config.reloading import ReloadAnswer

_EPILOG = f"""\
What can change while a gateway runs: limits, files of keys, the log level, routing weights, certificates. What cannot
is named, and needs a restart. A file with an error changes nothing. Flags and environment of a process cannot change:
what is read again is its --config file, and the files that settings name.

SIGHUP to a gateway, store or worker does the same for that process, SIGHUP to `medialane serve` for all that it has
started (in a terminal it stops them).

{KEY_HELP}

examples:
  medialane reload
  medialane reload --gateway https://10.0.0.1:8000 --admin-key-file /etc/medialane/admin-key"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    add_gateway(parser)


def run(args: argparse.Namespace) -> int:
    """0 if all gateways have read their settings again, 1 if not all. Raises StartupFailed."""
    return asyncio.run(_reload(args))


async def _reload(args: argparse.Namespace) -> int:
    async with connected(args) as gateway:
        answer = await gateway.ask(ReloadAnswer, "POST", "/medialane/reload")
    print(f"changed: {', '.join(answer.changed) or 'no setting'}")
    if answer.files:
        print(f"files read again: {', '.join(answer.files)}")
    if answer.needs_restart:
        print(f"needs a restart: {', '.join(answer.needs_restart)}")
    for index in answer.gateways_missing:
        print(f"gateway {index} has not read its settings again: see its log")
    return int(bool(answer.gateways_missing))
