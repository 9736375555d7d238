import pytest
from hypothesis import given
from hypothesis import strategies as st

from medialane.types.errors import ProtocolViolation
from medialane.wire import HEADER, Abort, FrameReader, append_frame

LIMIT = 4096
BODIES = st.lists(st.binary(max_size=600), max_size=8)


def stream_of(bodies):
    return b"".join(HEADER.pack(len(body)) + body for body in bodies)


def frames_of(reader, chunks):
    found, views = [], []
    for chunk in chunks:
        reader.receive(chunk)
        while (frame := reader.next_frame()) is not None:
            views.append(frame)
            found.append(bytes(frame))
    assert [bytes(view) for view in views] == found, "a frame changed after later chunks came"
    return found


@st.composite
def split_streams(draw):
    bodies = draw(BODIES)
    stream = stream_of(bodies)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    return bodies, chunks


@given(split_streams())
def test_any_split_of_the_stream_gives_the_same_frames(case):
    bodies, chunks = case
    assert frames_of(FrameReader(LIMIT), chunks) == bodies


@given(BODIES)
def test_stream_byte_by_byte_gives_the_same_frames(bodies):
    stream = stream_of(bodies)
    assert frames_of(FrameReader(LIMIT), [stream[i : i + 1] for i in range(len(stream))]) == bodies


@given(BODIES, st.integers(1, 600))
def test_frames_left_in_the_reader_survive_later_chunks(bodies, size):
    stream = stream_of(bodies)
    reader = FrameReader(LIMIT)
    for start in range(0, len(stream), size):
        reader.receive(stream[start : start + size])
    assert frames_of(reader, [b""]) == bodies


@given(st.binary(max_size=2000), st.integers(1, 64))
def test_any_bytes_give_bounded_frames_or_a_violation(noise, limit):
    reader = FrameReader(limit)
    reader.receive(noise)
    try:
        while (frame := reader.next_frame()) is not None:
            assert len(frame) <= limit
    except ProtocolViolation:
        pass


def test_too_large_frame_is_rejected_by_its_header_after_earlier_frames():
    reader = FrameReader(LIMIT)
    reader.receive(stream_of([b"fine"]) + HEADER.pack(LIMIT + 1))
    assert bytes(reader.next_frame()) == b"fine"
    with pytest.raises(ProtocolViolation, match="4097 bytes was announced"):
        reader.next_frame()


def test_frame_of_exactly_the_limit_passes():
    body = bytes(LIMIT)
    assert frames_of(FrameReader(LIMIT), [stream_of([body])]) == [body]


def test_appended_messages_are_read_back_as_frames():
    buffer = bytearray()
    sizes = [append_frame(buffer, Abort(f"request-{i}"), LIMIT) for i in range(3)]
    frames = frames_of(FrameReader(LIMIT), [bytes(buffer)])
    assert [len(frame) for frame in frames] == sizes


@pytest.mark.parametrize(("message", "error"), [(Abort("x" * 100), ProtocolViolation), (Abort(object()), TypeError)])
def test_failed_append_leaves_the_buffer_unchanged(message, error):
    buffer = bytearray(b"before")
    with pytest.raises(error):
        append_frame(buffer, message, 64)
    assert buffer == b"before"
