"""Certificates of a CA of the test's own, as files for the settings."""

import datetime as dt
from pathlib import Path

import trustme


def tls_settings(folder: Path, ca: trustme.CA, *, host: str = "127.0.0.1", **cert: object) -> dict[str, str]:
    """Write a new certificate of `ca`; return the settings of TLS."""
    folder.mkdir(exist_ok=True)
    issued = ca.issue_cert(host, **cert)
    paths = {name: folder / f"{name}.pem" for name in ("tls_cert", "tls_key", "tls_ca")}
    issued.cert_chain_pems[0].write_to_path(paths["tls_cert"])
    issued.private_key_pem.write_to_path(paths["tls_key"])
    paths["tls_key"].chmod(0o600)
    ca.cert_pem.write_to_path(paths["tls_ca"])
    return {name: str(path) for name, path in paths.items()}


def expired() -> dict[str, dt.datetime]:
    """Arguments of `tls_settings` for a certificate that was valid last year."""
    now = dt.datetime.now(dt.UTC)
    return {"not_before": now - dt.timedelta(days=800), "not_after": now - dt.timedelta(days=400)}
