"""`medialane reload`: has the gateways of a port read their settings again."""

from __future__ import annotations

import argparse
import asyncio

from medialane.cli.gateway_admin import KEY_HELP, add_gateway, connected
from medialane.config.reloading import SettingsChange

_EPILOG = f"""\
What is read again: the contents of files of keys (--keys, --admin-key-file, --metrics-key-file) and of certificates
(--ssl-certfile), and the log level in the --config file. Whatever else has changed in that file needs a restart, and is
named. A file with an error changes nothing.

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
        change = await gateway.ask(SettingsChange, "POST", "/medialane/reload")
    print(change)
    return int(bool(change.gateways_missing))
