"""MP4 files that refer to other files (`dref`, ISO/IEC 14496-12, 8.7.2).

FFmpeg, as PyAV and OpenCV build it, opens no such reference: it reads the samples from the file itself, which gives
garbage or another file's place in this one. So such a file is refused here. This is no parser of MP4: it looks for the
one box by its name, wherever it is, inside a preparer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from medialane.core.errors import UnsupportedMediaType

_DREF = re.compile(rb"dref")

#: Kinds of entry, so that four bytes of media data that happen to be `dref` refuse nothing.
_KINDS = (b"url ", b"urn ", b"alis", b"rsrc", b"imdt", b"snim")
_SELF_CONTAINED = 1

#: A track has one table of one entry. What has more is looked at no further: nothing opens what it refers to.
_MAX_TABLES = 1024
_MAX_ENTRIES = 64


def check_references(data: memoryview) -> None:
    """Raise UnsupportedMediaType if the MP4 says that some of its media are in another file."""
    for found in islice(_DREF.finditer(data), _MAX_TABLES):
        if not all(flags & _SELF_CONTAINED for flags in _entries(data, found.end())):
            raise UnsupportedMediaType("the video refers to another file")


def _entries(data: memoryview, offset: int) -> Iterator[int]:
    """Flags of the entries of the `dref` whose content begins at `offset`."""
    num_entries = int.from_bytes(data[offset + 4 : offset + 8], "big")
    offset += 8
    for _ in range(min(num_entries, _MAX_ENTRIES)):
        size, kind = int.from_bytes(data[offset : offset + 4], "big"), bytes(data[offset + 4 : offset + 8])
        if size < 12 or kind not in _KINDS:
            return
        yield int.from_bytes(data[offset + 9 : offset + 12], "big")
        offset += size
