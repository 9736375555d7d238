"""Rejects MP4 files that reference other files (`dref`, ISO/IEC 14496-12, 8.7.2).

FFmpeg, as built for PyAV and OpenCV, does not open such references: it reads the samples from the file itself, at the
other file's offsets, which gives garbage. This is not an MP4 parser: it searches for the box by name, anywhere in the
file. Runs inside a preparer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from medialane.core.errors import UnsupportedMediaType

_DREF = re.compile(rb"dref")

#: Entry types, so that `dref` occurring by chance in media data causes no rejection.
_KINDS = (b"url ", b"urn ", b"alis", b"rsrc", b"imdt", b"snim")
_SELF_CONTAINED = 1

#: A track has one table of one entry. Further ones are not checked, which is safe: FFmpeg opens no references.
_MAX_TABLES = 1024
_MAX_ENTRIES = 64


def check_references(data: memoryview) -> None:
    """Raise UnsupportedMediaType if the MP4 references media in another file."""
    for table in islice(_DREF.finditer(data), _MAX_TABLES):
        if not all(flags & _SELF_CONTAINED for flags in _entries(data, table.end())):
            raise UnsupportedMediaType("the video refers to another file")


def _entries(data: memoryview, offset: int) -> Iterator[int]:
    """Yield the flags of the entries of the `dref` whose content starts at `offset`."""
    num_entries = int.from_bytes(data[offset + 4 : offset + 8], "big")
    offset += 8
    for _ in range(min(num_entries, _MAX_ENTRIES)):
        size, kind = int.from_bytes(data[offset : offset + 4], "big"), bytes(data[offset + 4 : offset + 8])
        if size < 12 or kind not in _KINDS:
            return
        yield int.from_bytes(data[offset + 9 : offset + 12], "big")
        offset += size
