"""Freshness lifetime of HTTP responses (RFC 9111) in a shared cache."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from multidict import CIMultiDict, CIMultiDictProxy

Headers = CIMultiDict[str] | CIMultiDictProxy[str]


@dataclass(frozen=True, slots=True)
class Freshness:
    """Whether and for how long a response is fresh. `lifetime_s` is None if unspecified: then always revalidate."""

    storable: bool = True
    lifetime_s: float | None = None

    def through(self, redirect: Freshness) -> Freshness:
        """Return this response's freshness if reached through a redirect: at most the redirect's own."""
        lifetime_s = min(self.lifetime_s or 0.0, redirect.lifetime_s or 0.0)
        return Freshness(self.storable and redirect.storable, lifetime_s)


def freshness_of(headers: Headers) -> Freshness:
    """Return the freshness that a response's headers allow."""
    directives = _directives(headers)
    if "no-store" in directives or "private" in directives or headers.get("Vary", "").strip() == "*":
        return Freshness(storable=False)
    if "no-cache" in directives:
        return Freshness(lifetime_s=0.0)
    lifetime_s = _lifetime_s(directives, headers)
    if lifetime_s is None:
        return Freshness()
    return Freshness(lifetime_s=max(0.0, lifetime_s - (_seconds(headers.get("Age")) or 0.0)))


def _directives(headers: Headers) -> dict[str, str]:
    directives = {}
    for directive in ",".join(headers.getall("Cache-Control", [])).split(","):
        name, _, value = directive.partition("=")
        directives[name.strip().lower()] = value.strip().strip('"')
    return directives


def _lifetime_s(directives: dict[str, str], headers: Headers) -> float | None:
    for name in ("s-maxage", "max-age"):
        if name in directives:
            return _seconds(directives[name]) or 0.0
    if "Expires" not in headers:
        return None
    try:
        return (parsedate_to_datetime(headers["Expires"]) - parsedate_to_datetime(headers["Date"])).total_seconds()
    except (KeyError, ValueError, TypeError, OverflowError):  # no date, an invalid one, or only one with a time zone
        return 0.0


def _seconds(text: str | None) -> float | None:
    """Parse delta-seconds (RFC 9111, section 1.2.2); None if invalid. Ten digits are effectively forever."""
    return float(text[:10]) if text is not None and text.isascii() and text.isdigit() else None
