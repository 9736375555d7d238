"""The metrics of several models on one page: every series has vLLM's label `model_name`."""

from __future__ import annotations

import re
from collections.abc import Mapping

LABEL = b"model_name"

_HAS_LABEL = re.compile(rb'[{,]model_name="')


def labelled(page: bytes, model: str) -> bytes:
    """Return a page in Prometheus's text format with the label in each series that does not have it."""
    pair = LABEL + b'="' + _escaped(model) + b'"'
    return b"\n".join(line if not line or line[:1] == b"#" else _with(line, pair) for line in page.split(b"\n"))


def _with(line: bytes, pair: bytes) -> bytes:
    if _HAS_LABEL.search(line):
        return line
    name, separator, rest = line.partition(b"{")
    if separator and b" " not in name:
        return name + b"{" + pair + (b"" if rest[:1] == b"}" else b",") + rest
    name, _, value = line.partition(b" ")
    return name + b"{" + pair + b"} " + value


def up_page(up: Mapping[str, bool]) -> bytes:
    """Return the page of the router's own series."""
    lines = [
        b"# HELP medialane_model_up Whether a gateway of the model answers.",
        b"# TYPE medialane_model_up gauge",
        *(b'medialane_model_up{%b="%b"} %d' % (LABEL, _escaped(name), is_up) for name, is_up in up.items()),
    ]
    return b"\n".join([*lines, b""])


def _escaped(value: str) -> bytes:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").encode()
