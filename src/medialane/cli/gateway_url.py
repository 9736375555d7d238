"""The flags by which commands find gateways that run."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from medialane.config import ServerConfig
from medialane.types.errors import StartupFailed


def default_url() -> str:
    """Return the base URL of a gateway with default settings."""
    server = ServerConfig()
    return f"http://{server.host}:{server.port}"


def add_gateways(parser: argparse.ArgumentParser) -> None:
    """Add --gateway, which may be given for each of several hosts, and --insecure; `gateway_urls` reads the former."""
    parser.add_argument(
        "--gateway",
        metavar="URL",
        action="append",
        dest="gateways",
        help=f"base URL of a gateway (default {default_url()}), of one of several models with ?model=NAME; repeatable,"
        " for gateways of several hosts",
    )
    add_insecure(parser)


def add_insecure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--insecure", action="store_true", help="do not verify the gateway's certificate")


def gateway_urls(args: argparse.Namespace) -> list[str]:
    return args.gateways or [default_url()]


def base_url(url: str) -> str:
    """Return the URL of a gateway's root, of that or of its /v1 or /medialane, with its query. Raises StartupFailed."""
    root, question, query = url.partition("?")
    root = root.rstrip("/").removesuffix("/v1").removesuffix("/medialane")
    if not root.startswith(("http://", "https://")):
        raise StartupFailed(f"--gateway {url}: not a URL such as http://127.0.0.1:8000")
    return f"{root}{question}{query}"


def endpoint(url: str, path: str) -> str:
    """Return the URL of a path of the gateway at a base URL, whose query names one of its models."""
    root, question, query = url.partition("?")
    return f"{root}{path}{question}{query}"


def several_models(url: str, names: Iterable[str]) -> StartupFailed:
    """Return the error if the base URL is that of several models."""
    first, *_ = named = list(names)
    return StartupFailed(f"{url} has several models ({', '.join(named)}): add one to its URL: {url}?model={first}")
