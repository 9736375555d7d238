"""What a client may read of an exception that is not ours.

vLLM's own messages for clients are short sentences. Others put what they were working on into their message (`Failed to
apply ... on data={'audio': [array([...` is 640 characters of samples), or addresses and paths.
"""

from __future__ import annotations

import re

#: vLLM's longest message for clients has some 500 characters.
MAX_CHARS = 1000

#: Where contents begin: of arrays, tensors, images, nested or long lists of numbers, and `repr`s with an address.
_CONTENTS = re.compile(
    r"""
    \b (?: array | tensor | ndarray | Tensor ) \(
    | \b data= [{\[(]
    | < [\w.]+ [^<>]* \b (?: at \s 0x | size= | mode= )
    | \[ \s* \[ [\s\[]* -? [\d.]
    | [\[(] \s* (?: -? (?: \d+ \.? \d* (?: e [-+]? \d+ )? | nan | inf ) [\s,]+ ){8}
    """,
    re.VERBOSE,
)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")


def public_text(error: BaseException) -> str:
    """The message of `error` up to the first thing in it that a client must not read, within MAX_CHARS."""
    text = str(error)[: 2 * MAX_CHARS]
    contents = _CONTENTS.search(text)
    whole = contents is None and len(text) <= MAX_CHARS
    if contents is not None:
        text = text[: contents.start()]
    text = _ADDRESS.sub("...", text)[:MAX_CHARS].rstrip()
    return text if whole else f"{text} ..."
