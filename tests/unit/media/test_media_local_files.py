import os

import pytest

from medialane.core.errors import EmptyMedia, InvalidMediaUrl, MediaFetchFailed, MediaTooLarge, MediaUrlForbidden
from medialane.media import FetchLimits, local_files
from medialane.media.local_files import LocalFiles

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
    files = LocalFiles(str(root))
    yield files
    files.close()


@pytest.fixture(params=["openat2", "walk"])
def way(request, monkeypatch):
    """Both ways of opening; the second is for kernels and sandboxes without the first."""
    if request.param == "walk":
        monkeypatch.setattr(local_files, "_open_beneath", local_files._walk)
    return request.param


@pytest.mark.parametrize(
    ("path", "data"), [("a%20b.png", b"image"), ("sub/c.png", b"other"), ("sub//c.png?x#y", b"other")]
)
async def test_files_below_the_root_are_read(files, root, way, path, data):
    assert await files.read(f"file://{root}/{path}", LIMITS) == data
    assert await files.read(f"file://localhost{root}/{path}", LIMITS) == data


async def test_links_that_stay_inside_are_followed(files, root):
    """As in a Hugging Face cache, whose snapshots are links."""
    assert await files.read(f"file://{root}/inner", LIMITS) == b"other"


@pytest.mark.parametrize(
    "path", ["outer", "absolute", "up/secret", "../secret", "sub/../../secret", "%2e%2e/secret", "pipe", "sub", ".", ""]
)
async def test_nothing_else_is_read(files, root, way, path):
    with pytest.raises((MediaUrlForbidden, InvalidMediaUrl)) as raised:
        await files.read(f"file://{root}/{path}", LIMITS)
    assert str(root) not in raised.value.message


@pytest.mark.parametrize("url", ["file:///etc/passwd", "file:///proc/self/environ", "file:///dev/zero", "file:///"])
async def test_nothing_outside_is_read(files, url):
    with pytest.raises((MediaUrlForbidden, InvalidMediaUrl)):
        await files.read(url, LIMITS)


async def test_folder_with_the_same_beginning_is_outside(files, root):
    with pytest.raises(MediaUrlForbidden):
        await files.read(f"file://{root}-too/d", LIMITS)


async def test_link_swapped_in_between_does_not_lead_out(root, way):
    (root / "a b.png").unlink()
    (root / "a b.png").symlink_to("../secret")
    with pytest.raises(MediaUrlForbidden):
        local_files.read_beneath(str(root), "a b.png", 100)


async def test_missing_file(files, root, way):
    with pytest.raises(MediaFetchFailed):
        await files.read(f"file://{root}/missing", LIMITS)


async def test_empty_file(files, root):
    with pytest.raises(EmptyMedia):
        await files.read(f"file://{root}/empty", LIMITS)


async def test_large_file(files, root):
    with pytest.raises(MediaTooLarge):
        await files.read(f"file://{root}/large", LIMITS)


@pytest.mark.parametrize("url", ["file:a", "file://host/a", "file:///a%00b", "file://"])
async def test_malformed_urls(files, url):
    with pytest.raises(InvalidMediaUrl):
        await files.read(url, LIMITS)


async def test_without_a_root_everything_is_refused(root):
    files = LocalFiles(None)
    with pytest.raises(MediaUrlForbidden):
        await files.read(f"file://{root}/sub/c.png", LIMITS)
    files.close()


async def test_no_descriptor_is_left_open(files, root, way):
    before = len(os.listdir("/proc/self/fd"))
    for path in ("sub/c.png", "outer", "missing", "pipe", "large"):
        with pytest.raises((MediaUrlForbidden, MediaFetchFailed, MediaTooLarge)):
            local_files.read_beneath(str(root), path, 3)
    assert len(os.listdir("/proc/self/fd")) == before


def test_filtered_system_call_falls_back_to_walking(root, monkeypatch):
    monkeypatch.setattr(local_files, "_SYS_OPENAT2", 100_000)  # no such call: ENOSYS
    assert local_files.read_beneath(str(root), "sub/c.png", 100) == b"other"
