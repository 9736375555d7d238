import ctypes
import errno
import os
import threading

import pytest
from kept_bodies import KeptFiles

from limits import no_free_descriptors
from medialane.media import FetchLimits, local_files
from medialane.media.local_files import OpenFile
from medialane.runtime.linux import libc
from medialane.types.errors import (
    EmptyMedia,
    InvalidMediaUrl,
    MediaFetchFailed,
    MediaFetchTimeout,
    MediaTooLarge,
    MediaUrlForbidden,
    Unavailable,
)
from medialane.types.hashing import content_hash
from races import before
from waiting import eventually

LIMITS = FetchLimits(max_bytes=100, timeout_s=5.0)


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "media"
    (root / "sub").mkdir(parents=True)
    (root / "a b.png").write_bytes(b"image")
    (root / "sub" / "c.png").write_bytes(b"other")
    (root / "empty").touch()
    (root / "large").write_bytes(bytes(101))
    (root / "inner").symlink_to("sub/c.png")
    (root / "outer").symlink_to("../secret")
    (root / "absolute").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to("..")
    os.mkfifo(root / "pipe")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media-too").mkdir()
    (tmp_path / "media-too" / "d").write_bytes(b"secret")
    return root


@pytest.fixture
def files(root):
    files = KeptFiles(str(root))
    yield files
    files.close()


async def content(files, url):
    hash_, data = await files.read(url, LIMITS)
    assert hash_ == content_hash(data)
    return data


@pytest.fixture(params=["openat2", errno.ENOSYS, errno.EPERM])
def way(request, monkeypatch):
    """All ways of opening: by openat2, and without it in older kernels and in sandboxes."""

    def refuse(*_arguments):
        ctypes.set_errno(request.param)
        return -1

    if request.param != "openat2":
        monkeypatch.setattr(libc, "syscall", refuse)
    return request.param


async def test_server_without_free_files_is_not_the_clients_fault(files, root):
    await content(files, f"file://{root}/sub/c.png")  # the threads have started
    with no_free_descriptors(), pytest.raises(Unavailable):
        await files.read(f"file://{root}/sub/c.png", LIMITS)


@pytest.mark.parametrize(
    ("path", "data"), [("a%20b.png", b"image"), ("sub/c.png", b"other"), ("sub//c.png?x#y", b"other")]
)
async def test_files_below_the_root_are_read(files, root, way, path, data):
    assert await content(files, f"file://{root}/{path}") == data
    assert await content(files, f"file://localhost{root}/{path}") == data


async def test_links_that_stay_inside_are_followed(files, root):
    """As in a Hugging Face cache, whose snapshots are links."""
    assert await content(files, f"file://{root}/inner") == b"other"


@pytest.mark.parametrize(
    "path", ["outer", "absolute", "up/secret", "../secret", "sub/../../secret", "%2e%2e/secret", "pipe", "sub", ".", ""]
)
async def test_only_regular_files_are_read(files, root, way, path):
    with pytest.raises((MediaUrlForbidden, InvalidMediaUrl)) as raised:
        await files.read(f"file://{root}/{path}", LIMITS)
    assert str(root) not in raised.value.message


@pytest.mark.parametrize("url", ["file:///etc/passwd", "file:///proc/self/environ", "file:///dev/zero", "file:///"])
async def test_nothing_outside_is_read(files, url):
    with pytest.raises((MediaUrlForbidden, InvalidMediaUrl)):
        await files.read(url, LIMITS)


async def test_folder_sharing_a_name_prefix_is_outside(files, root):
    with pytest.raises(MediaUrlForbidden):
        await files.read(f"file://{root}-too/d", LIMITS)


async def test_link_swapped_during_the_open_does_not_escape(root, way):
    (root / "a b.png").unlink()
    (root / "a b.png").symlink_to("../secret")
    with pytest.raises(MediaUrlForbidden):
        local_files.open_beneath(str(root), "a b.png")


async def test_missing_file_is_rejected(files, root, way):
    with pytest.raises(MediaFetchFailed):
        await files.read(f"file://{root}/missing", LIMITS)


async def test_empty_file_is_rejected(files, root):
    with pytest.raises(EmptyMedia):
        await files.read(f"file://{root}/empty", LIMITS)


async def test_file_over_the_limit_is_rejected(files, root):
    with pytest.raises(MediaTooLarge):
        await files.read(f"file://{root}/large", LIMITS)


@pytest.mark.parametrize("url", ["file:a", "file://host/a", "file:///a%00b", "file://"])
async def test_malformed_urls_are_rejected(files, url):
    with pytest.raises(InvalidMediaUrl):
        await files.read(url, LIMITS)


async def test_without_a_root_everything_is_rejected(root):
    files = KeptFiles(None)
    with pytest.raises(MediaUrlForbidden):
        await files.read(f"file://{root}/sub/c.png", LIMITS)
    files.close()


async def test_no_descriptor_is_left_open(files, root, way):
    before = len(os.listdir("/proc/self/fd"))
    for path in ("sub/c.png", "outer", "missing", "pipe", "large"):
        with pytest.raises((MediaUrlForbidden, MediaFetchFailed, MediaTooLarge)):
            await files.read(f"file://{root}/{path}", FetchLimits(max_bytes=3, timeout_s=5.0))
    assert len(os.listdir("/proc/self/fd")) == before


class Pieces:
    """A body that tells what it was given."""

    def __init__(self):
        self.calls = []

    def expect(self, num_bytes):
        self.calls.append(("expect", num_bytes))

    def write(self, piece):
        self.calls.append(("write", len(piece)))

    def finish(self, content_hash):
        self.calls.append(("finish", content_hash))

    def abandon(self):
        self.calls.append(("abandon",))


async def test_file_is_written_to_the_body_in_chunks(files, root):
    whole = os.urandom(2_500_000)
    (root / "long").write_bytes(whole)
    body = Pieces()
    limits = FetchLimits(max_bytes=3_000_000, timeout_s=5.0)
    assert await files.read(f"file://{root}/long", limits, open_body=lambda: body) == (content_hash(whole), None)
    mib = 1 << 20
    assert body.calls == [
        ("expect", len(whole)),
        *(("write", nbytes) for nbytes in (mib, mib, len(whole) - 2 * mib)),
        ("finish", content_hash(whole)),
    ]


async def test_file_growing_after_the_open_is_limited(files, root):
    class Growing(Pieces):
        def expect(self, num_bytes):
            super().expect(num_bytes)
            (root / "a b.png").write_bytes(bytes(101))

    body = Growing()
    with pytest.raises(MediaTooLarge):
        await files.read(f"file://{root}/a%20b.png", LIMITS, open_body=lambda: body)
    assert body.calls == [("expect", 5), ("abandon",)]


@pytest.mark.parametrize("slow", ["open", "read"])
async def test_cancelled_read_leaves_no_descriptor_or_body(files, root, slow, monkeypatch):
    opened, gate, body = set(os.listdir("/proc/self/fd")), threading.Event(), Pieces()
    read = OpenFile.read

    def wait():
        assert gate.wait(5)

    def slow_read(file):
        wait()
        return read(file)

    if slow == "read":
        monkeypatch.setattr(OpenFile, "read", slow_read)
    with before("open", *[wait] * (slow == "open")), pytest.raises(MediaFetchTimeout):
        await files.read(f"file://{root}/sub/c.png", FetchLimits(100, 0.2), open_body=lambda: body)
    assert body.calls[-1] == ("abandon",)
    gate.set()
    await eventually(lambda: not set(os.listdir("/proc/self/fd")) - opened, "a thread closes the file")
