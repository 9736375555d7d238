"""`medialane certs`: makes the certificates with which processes of several hosts authenticate each other."""

from __future__ import annotations

import argparse
from pathlib import Path

from medialane.types.errors import StartupFailed
from medialane.wire.certificate_authority import CA, CA_KEY, CERTIFICATE, KEY, Authority, host_names

_DAYS = 365
_EPILOG = """\
The first call makes a certificate authority in DIR, later calls use it. Each --host gets a folder with its certificate,
its private key and the authority's certificate: copy it to that host, to the same path on all of them. Processes load
files that change for their next connections, without a restart. Keep DIR/ca-key.pem offline: whoever has it can make
certificates that are accepted everywhere.

examples:
  medialane certs certs --host node1,10.0.0.1 --host node2,10.0.0.2
  medialane certs certs --host node3,10.0.0.3              # one more host
  medialane certs certs --host node1,10.0.0.1 --force      # renew"""

#: Where a host's files are in the flags that are printed.
_THERE = "/etc/medialane/tls"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder of the certificate authority")
    parser.add_argument(
        "--host",
        metavar="NAME_OR_IP[,...]",
        action="append",
        dest="hosts",
        required=True,
        help="all names and addresses of one host, as others connect to it; repeatable",
    )
    parser.add_argument("--days", type=int, metavar="N", default=_DAYS, help=f"validity (default {_DAYS} days)")
    parser.add_argument("--force", action="store_true", help="replace the certificate and key of a host that has one")


def run(args: argparse.Namespace) -> int:
    """Make the files, and print what to do with them. Raises StartupFailed."""
    if not 1 <= args.days <= 3650:
        raise StartupFailed("--days must be between 1 and 3650")
    hosts = [host_names(words) for words in args.hosts]
    folders = [names[0] for names in hosts]
    if len(set(folders)) < len(folders):
        raise StartupFailed("--host: the same name twice; give all names of a host at once: --host node1,10.0.0.1")
    if taken := [args.folder / name for name in folders if (args.folder / name).exists() and not args.force]:
        raise StartupFailed(f"{taken[0]} exists: --force renews it, with a new key")
    authority = Authority.open(args.folder)
    how = "new" if authority.was_made else "used"
    print(f"{args.folder / CA}, {CA_KEY}: certificate authority ({how})")
    for names in hosts:
        certificate = authority.issue(names, days=args.days, replace=args.force)
        until = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
        print(f"{args.folder / names[0]}/: certificate for {', '.join(names)}, valid until {until}")
    print(_next_steps(args.folder, folders[0]))
    return 0


def _next_steps(folder: Path, name: str) -> str:
    return f"""
Copy each folder to its host:  rsync -a {folder / name}/ {name}:{_THERE}/
and start all processes with
  --rpc-tls-cert {_THERE}/{CERTIFICATE} --rpc-tls-key {_THERE}/{KEY} --rpc-tls-ca {_THERE}/{CA}
and a shared secret (--rpc-secret-file). Keep {folder / CA_KEY} offline."""
