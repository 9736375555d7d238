"""A modality that the tables do not have yet is sniffed, opened, measured and decoded once its rows are there."""

import numpy as np
import pytest

from medialane.media import MediaConfig, decode, installed_kinds, measure, needs_probe, probe, sniff
from medialane.media.decoders import DECODERS, Decoder, Kind
from medialane.prepare.processor import decoded_item
from medialane.types.errors import InvalidImage, UnsupportedMediaType
from medialane.types.media import MODALITIES, MediaSize, ModalityTraits

CONFIG = MediaConfig()
MAGIC = b"PCD\1"


class PointCloud:
    def __init__(self, points):
        self.array = points
        self.size = MediaSize(num_samples=len(points))


def sniff_points(data, config):
    if not bytes(data).startswith(MAGIC):
        raise UnsupportedMediaType("the media is not a point cloud")
    return "model/pcd"


def check_points(data, media_type, config):
    if (len(data) - len(MAGIC)) % 12:
        raise InvalidImage("a point is incomplete")


def decode_points(data, media_type, config, options):
    check_points(data, media_type, config)
    return PointCloud(np.frombuffer(data, np.float32, offset=len(MAGIC)).reshape(-1, 3))


def measure_points(data, media_type, config, options):
    check_points(data, media_type, config)
    return MediaSize(num_samples=(len(data) - len(MAGIC)) // 12)


@pytest.fixture(autouse=True)
def point_clouds(monkeypatch):
    row = Decoder(
        sniff=sniff_points,
        check=check_points,
        decode=decode_points,
        measure=measure_points,
        kinds=lambda modality, load: [Kind(modality, "pcd")],
        kind=lambda media_type: "pcd",
        magic=(MAGIC,),
    )
    monkeypatch.setitem(DECODERS, "point_cloud", row)
    traits = ModalityTraits({"point_cloud_url": "url"}, url_list="point_clouds", invalid=InvalidImage)
    monkeypatch.setitem(MODALITIES, "point_cloud", traits)
    installed_kinds.cache_clear()
    yield
    monkeypatch.undo()
    installed_kinds.cache_clear()


def test_new_modality_is_decoded_to_its_array():
    data = memoryview(MAGIC + np.arange(6, dtype=np.float32).tobytes())
    media_type = sniff(data, "point_cloud", CONFIG)
    assert needs_probe(media_type)
    probe(data, "point_cloud", media_type, CONFIG)
    given = {"media_type": media_type, "io": b"{}", "config": CONFIG, "sampler": None}
    item = decoded_item(decode(data, "point_cloud", **given))
    assert (item.specs[0].dtype, item.specs[0].shape) == ("float32", (2, 3))
    assert item.size == measure(data, "point_cloud", **given) == MediaSize(num_samples=2)
    assert "point_cloud (pcd)" in installed_kinds().line()


def test_damaged_and_other_files_of_a_new_modality_are_told_apart():
    with pytest.raises(InvalidImage, match="or it is damaged"):
        sniff(b"points?", "point_cloud", CONFIG)
    with pytest.raises(UnsupportedMediaType):
        sniff(b"\x89PNG\r\n\x1a\n", "point_cloud", CONFIG)
    with pytest.raises(UnsupportedMediaType):
        sniff(MAGIC, "image", CONFIG)
    with pytest.raises(InvalidImage, match="incomplete"):
        probe(memoryview(MAGIC + b"1"), "point_cloud", "model/pcd", CONFIG)
