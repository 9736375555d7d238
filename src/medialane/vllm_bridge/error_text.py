"""Sanitises messages of third-party exceptions for clients.

vLLM's own messages for clients are short sentences. Others include the data being processed (`Failed to apply ... on
data={'audio': [array([...` is 640 characters of samples), or addresses and paths.
"""

from __future__ import annotations

import re

#: vLLM's longest message for clients has about 500 characters.
MAX_CHARS = 1000

_FLOAT = r"(?: -? \d+ \. \d* (?: e [-+]? \d+ )? | -? nan | -? inf )"
_INTEGER = r"-? \d+"

#: Start of dumped data: `data=`, the `repr` of an array, of a tensor or with an address, and nested or long lists of
#: numbers. Shapes and ranges of values do not match.
_CONTENTS = re.compile(
    rf"""
    \b data=
    | \b (?: array | tensor | ndarray | Tensor ) \(
    | < [\w.]+ [^<>]* \b (?: at \s 0x | size= | mode= )
    | \[ \s* \[ [\s\[]* (?: {_FLOAT} | {_INTEGER} )
    | [\[(] \s* {_FLOAT} (?: [\s,]+ {_FLOAT} ){{2}}
    | [\[(] \s* {_INTEGER} (?: [\s,]+ {_INTEGER} ){{7}}
    """,
    re.VERBOSE,
)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")


def public_text(error: BaseException) -> str:
    """Return the message of `error` up to the first content that a client must not see, at most MAX_CHARS of it."""
    text = str(error)[: 2 * MAX_CHARS]
    contents = _CONTENTS.search(text)
    whole = contents is None and len(text) <= MAX_CHARS
    if contents is not None:
        text = text[: contents.start()]
    text = _ADDRESS.sub("...", text)[:MAX_CHARS].rstrip()
    return text if whole else f"{text} ..."
