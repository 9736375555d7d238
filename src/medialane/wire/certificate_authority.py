"""A certificate authority in a folder, which signs the certificates of hosts (`medialane certs`).

    DIR/ca.pem, DIR/ca-key.pem                        the authority; the key is needed only to sign
    DIR/HOST/cert.pem, DIR/HOST/key.pem, DIR/HOST/ca.pem    what a host needs

Certificates are X.509 v3 with P-256 keys: for server and client authentication, since each process is both, and for the
names and addresses of the host.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from medialane.runtime.private_files import read, read_private
from medialane.types.errors import StartupFailed
from medialane.types.setting import ascii_host

CA_DAYS = 3650
CERTIFICATE, KEY, CA = "cert.pem", "key.pem", "ca.pem"
CA_KEY = "ca-key.pem"
_MODES = {KEY: 0o600, CA_KEY: 0o600}
#: Certificates are valid a little before they are made: clocks of hosts differ.
_CLOCK_SKEW = dt.timedelta(hours=1)
#: RFC 5280, ub-common-name.
_MAX_COMMON_NAME = 64


@dataclass(frozen=True)
class Authority:
    """`was_made`: by `open`, just now."""

    folder: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    was_made: bool

    @staticmethod
    def open(folder: Path) -> Authority:
        """Return the authority in `folder`, which is made if it has none. Raises StartupFailed."""
        certificate, key = folder / CA, folder / CA_KEY
        if not certificate.exists() and not key.exists():
            return _make(folder)
        for path in (certificate, key):
            if not path.exists():
                raise StartupFailed(f"{folder} has a certificate authority, but not {path}, which signs")
        return _load(folder)

    def issue(self, names: Sequence[str], *, days: int, replace: bool) -> x509.Certificate:
        """Make the folder of a host, which is called as the first of its `names`, with a new key. Raises StartupFailed
        if it exists, unless it is to be replaced."""
        target = self.folder / names[0]
        if target.exists() and not replace:
            raise StartupFailed(f"{target} exists: --force renews it, with a new key")
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(names, key.public_key(), days)
        files = {KEY: _pem_of_key(key), CERTIFICATE: _pem(certificate), CA: _pem(self.certificate)}
        _write_files(target, files)
        return certificate

    def _sign(self, names: Sequence[str], public: ec.EllipticCurvePublicKey, days: int) -> x509.Certificate:
        now, end = utc_now(), self.certificate.not_valid_after_utc
        if end <= now:
            raise StartupFailed(f"{self.folder / CA} has expired on {end:%Y-%m-%d}: make a new one in another folder")
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = (
            _builder(names[0][:_MAX_COMMON_NAME], public, until=min(now + dt.timedelta(days=days), end))
            .issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(is_ca=False), critical=True)
            .add_extension(usage, critical=False)
            .add_extension(x509.SubjectAlternativeName([_san(name) for name in names]), critical=False)
            .add_extension(_identifier_of(self.key.public_key()), critical=False)
        )
        return builder.sign(self.key, hashes.SHA256())


def host_names(words: str) -> list[str]:
    """Parse the names and addresses of one host, separated by commas. Raises StartupFailed."""
    names = [word.strip().removeprefix("[").removesuffix("]") for word in words.split(",")]
    if any("%" in name for name in names):
        raise StartupFailed(f"--host {words}: a certificate cannot name an interface")
    try:
        return [ascii_host(name).removesuffix(".").lower() for name in names]
    except ValueError as error:
        raise StartupFailed(f"--host {words}: {error}") from error


def _make(folder: Path) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder("medialane CA", key.public_key(), until=utc_now() + dt.timedelta(days=CA_DAYS))
    certificate = (
        builder.issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "medialane CA")]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_ca=True), critical=True)
        .add_extension(_identifier_of(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_files(folder, {CA_KEY: _pem_of_key(key), CA: _pem(certificate)})
    return Authority(folder, certificate, key, was_made=True)


def _load(folder: Path) -> Authority:
    try:
        certificate = x509.load_pem_x509_certificate(read(str(folder / CA), "")[0])
        key = serialization.load_pem_private_key(read_private(str(folder / CA_KEY), ""), password=None)
        certificate.verify_directly_issued_by(certificate)
    except (ValueError, TypeError, InvalidSignature) as error:  # TypeError: the key has a password
        raise StartupFailed(f"{folder} has no certificate authority that can be used: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise StartupFailed(f"{folder / CA_KEY} is not the key of {folder / CA}")
    return Authority(folder, certificate, key, was_made=False)


def _builder(name: str, public: ec.EllipticCurvePublicKey, *, until: dt.datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(utc_now() - _CLOCK_SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _identifier_of(issuer: ec.EllipticCurvePublicKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer)


def _key_usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )


def _san(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def utc_now() -> dt.datetime:
    return dt.datetime.now(dt.UTC).replace(microsecond=0)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files, each at once; keys are readable by their owner only. Raises StartupFailed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            new = folder / f".{name}.{os.getpid()}"
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODES.get(name, 0o644))
            with open(descriptor, "wb") as file:
                file.write(content)
            new.replace(folder / name)
    except OSError as error:
        raise StartupFailed(f"cannot write {error.filename or folder}: {error.strerror}") from error
