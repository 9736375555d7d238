"""The sizes in an AVIF (ISO/IEC 14496-12, 23008-12; AV1 Image File Format), those inside its coded pictures included.

Theory of operation. A picture's size stands in a property (`ispe`) and again at the start of the coded picture, in its
AV1 sequence header (AV1 bitstream specification, section 5.5). libavif allocates and decodes what the second one says,
and scales the result to the first. So both are read: of every item, and of the first sample of every track, which is
what is decoded of an animation. Structures that libavif does not take are left to its verdict.

A file may hold millions of boxes within boxes, and items that overlap: everything is counted over the whole file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from medialane.core.errors import ImageTooComplex, InvalidImage
from medialane.media.header_bytes import big, take

#: Real files have some tens of boxes, and some more for each tile of a grid; the format allows 65536 tiles.
_MAX_STEPS = 4096

_SEQUENCE_HEADER = 1

Size = tuple[int, int]


def avif_sizes(view: memoryview, max_exif_bytes: int) -> list[Size]:
    """Every (width, height) that the file's header and its coded pictures name.

    Raises InvalidImage (none, or a header that ends early), ImageTooComplex (EXIF included).
    """
    walk = _Walk()
    sizes: list[Size] = []
    for meta in walk.boxes(view, b"meta"):
        body = meta[4:]
        sizes += _property_sizes(walk, body)
        sizes += _item_sizes(walk, body, view, max_exif_bytes)
    if not sizes:
        raise InvalidImage("the image has no size in its header")
    for start, end in _first_samples(walk, view):
        sizes += _coded_sizes(walk, view[start:end])
    return sizes


class _Walk:
    """Counts steps over the whole file. Raises ImageTooComplex when there are too many."""

    def __init__(self) -> None:
        self._num_left = _MAX_STEPS

    def step(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise ImageTooComplex("the image has too many parts")

    def boxes(self, view: memoryview, *path: bytes) -> Iterator[memoryview]:
        """Contents of the boxes that lie at this path of kinds in `view`."""
        offset = 0
        while offset + 8 <= len(view):
            self.step()
            size, start = big(view, offset, 4), 8
            if size == 1:
                size, start = big(view, offset + 8, 8), 16
            end = len(view) if size == 0 else offset + size
            if end < offset + start or end > len(view):
                raise InvalidImage("the image ends within its header")
            if view[offset + 4 : offset + 8] == path[0]:
                inside = view[offset + start : end]
                if path[1:]:
                    yield from self.boxes(inside, *path[1:])
                else:
                    yield inside
            offset = end


def _property_sizes(walk: _Walk, meta: memoryview) -> list[Size]:
    return [(big(ispe, 4, 4), big(ispe, 8, 4)) for ispe in walk.boxes(meta, b"iprp", b"ipco", b"ispe")]


def _item_sizes(walk: _Walk, meta: memoryview, file: memoryview, max_exif_bytes: int) -> list[Size]:
    kinds = _item_kinds(walk, meta)
    held = next(walk.boxes(meta, b"idat"), file[:0])
    sizes: list[Size] = []
    num_exif = num_bytes = 0
    for iloc in walk.boxes(meta, b"iloc"):
        for item, method, extents in _located(walk, iloc):
            source = held if method == 1 else file
            parts = [source[start : start + length] if length else source[start:] for start, length in extents]
            length = sum(map(len, parts))
            num_bytes += length
            num_exif += length if kinds.get(item) == b"Exif" else 0
            if num_bytes > 2 * len(file) or num_exif > max_exif_bytes:
                raise ImageTooComplex("the image has too much in too many parts")
            if kinds.get(item) == b"av01":
                sizes += _coded_sizes(walk, parts[0] if len(parts) == 1 else memoryview(b"".join(parts)))
    return sizes


def _item_kinds(walk: _Walk, meta: memoryview) -> dict[int, bytes]:
    """The type of every item that is listed."""
    kinds = {}
    for iinf in walk.boxes(meta, b"iinf"):
        for infe in walk.boxes(iinf[6 if big(iinf, 0, 1) == 0 else 8 :], b"infe"):
            wide = 4 if big(infe, 0, 1) >= 3 else 2
            kinds[big(infe, 4, wide)] = bytes(infe[6 + wide : 10 + wide])
    return kinds


def _located(walk: _Walk, iloc: memoryview) -> Iterator[tuple[int, int, Sequence[Size]]]:
    """(item, construction method, [(offset, length)]) of every item; a length of 0 is all there is."""
    version, sizes = big(iloc, 0, 1), big(iloc, 4, 2)
    offset_size, length_size, base_size = sizes >> 12, sizes >> 8 & 15, sizes >> 4 & 15
    index_size = sizes & 15 if version else 0
    wide = 4 if version == 2 else 2
    numbers = _Numbers(iloc, 6)
    for _ in range(numbers.take(wide)):
        walk.step()
        item = numbers.take(wide)
        method = numbers.take(2) & 15 if version else 0
        numbers.take(2)
        base = numbers.take(base_size)
        extents = []
        for _ in range(numbers.take(2)):
            walk.step()
            numbers.take(index_size)
            extents.append((base + numbers.take(offset_size), numbers.take(length_size)))
        yield item, method, extents


class _Numbers:
    def __init__(self, view: memoryview, offset: int) -> None:
        self._view = view
        self._offset = offset

    def take(self, nbytes: int) -> int:
        found = big(self._view, self._offset, nbytes) if nbytes else 0
        self._offset += nbytes
        return found


def _first_samples(walk: _Walk, file: memoryview) -> Iterator[tuple[int, int]]:
    """Where the first sample of every track begins and ends in the file."""
    for table in walk.boxes(file, b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        starts = [big(stco, 8, 4) for stco in walk.boxes(table, b"stco") if big(stco, 4, 4)]
        starts += [big(co64, 8, 8) for co64 in walk.boxes(table, b"co64") if big(co64, 4, 4)]
        lengths = [big(stsz, 4, 4) or big(stsz, 12, 4) for stsz in walk.boxes(table, b"stsz") if big(stsz, 8, 4)]
        yield from ((start, start + length) for start in starts for length in lengths)


def _coded_sizes(walk: _Walk, view: memoryview) -> Iterator[Size]:
    """The sizes of the sequence headers among the OBUs (AV1, section 5.3) of a coded picture."""
    offset = 0
    while offset < len(view):
        walk.step()
        first = view[offset]
        offset += 2 if first & 4 else 1
        length = len(view) - offset
        if first & 2:
            length, offset = _leb128(view, offset)
        if first >> 3 & 15 == _SEQUENCE_HEADER:
            yield _sequence_size(take(view[offset : offset + length], 0, min(length, 512, len(view) - offset)))
        offset += length


def _leb128(view: memoryview, offset: int) -> tuple[int, int]:
    """The number, and where it ends (AV1, section 4.10.5)."""
    found = 0
    for n in range(8):
        byte = big(view, offset + n, 1)
        found |= (byte & 127) << 7 * n
        if byte < 128:
            return found, offset + n + 1
    raise InvalidImage("the image has a length that makes no sense")


def _sequence_size(header: bytes) -> Size:
    """max_frame_width and max_frame_height (AV1, section 5.5.1): frames may be smaller, never larger."""
    bits = _Bits(header)
    bits.take(4)  # seq_profile, still_picture
    if bits.take(1):  # reduced_still_picture_header
        bits.take(5)
    else:
        _skip_operating_points(bits)
    width_bits, height_bits = bits.take(4) + 1, bits.take(4) + 1
    return bits.take(width_bits) + 1, bits.take(height_bits) + 1


def _skip_operating_points(bits: _Bits) -> None:
    delay_bits = 0
    if bits.take(1):  # timing_info
        bits.take(64)
        if bits.take(1):  # equal_picture_interval
            bits.skip_uvlc()
        if bits.take(1):  # decoder_model_info
            delay_bits = bits.take(5) + 1
            bits.take(42)
    has_display_delay = bits.take(1)
    for _ in range(bits.take(5) + 1):
        bits.take(12)
        if bits.take(5) > 7:  # seq_level_idx
            bits.take(1)
        if delay_bits and bits.take(1):
            bits.take(2 * delay_bits + 1)
        if has_display_delay and bits.take(1):
            bits.take(4)


class _Bits:
    def __init__(self, data: bytes) -> None:
        self._number = int.from_bytes(data, "big")
        self._num_left = 8 * len(data)

    def take(self, num_bits: int) -> int:
        self._num_left -= num_bits
        if self._num_left < 0:
            raise InvalidImage("the image ends within its header")
        return self._number >> self._num_left & (1 << num_bits) - 1

    def skip_uvlc(self) -> None:
        """AV1, section 4.10.3."""
        num_zeros = 0
        while not self.take(1):
            num_zeros += 1
        if num_zeros < 32:
            self.take(num_zeros)
