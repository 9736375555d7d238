import pytest

from medialane.media import FetchLimits, MediaConfig
from medialane.types.errors import StartupFailed


def test_defaults_are_valid():
    MediaConfig().validate()


@pytest.mark.parametrize(
    "setting",
    [
        {"max_body_bytes": 0},
        {"max_items": -1},
        {"image_fetch_timeout_s": 0.0},
        {"max_redirects": -1},
        {"max_image_pixels": 200_000_000},
        {"allowed_media_networks": ("10.0.0.0/8", "nonsense")},
        {"allowed_media_networks": ("10.0.0.1/8",)},
        {"allowed_media_ports": (80, 0)},
        {"allowed_local_media_path": "/no/such/folder"},
    ],
    ids=str,
)
def test_invalid_setting_is_named(setting):
    with pytest.raises(StartupFailed, match=next(iter(setting))):
        MediaConfig(**setting).validate()


def test_limits_by_modality():
    assert MediaConfig(max_image_bytes=5).fetch_limits("image") == FetchLimits(5, 10.0)
    assert MediaConfig(max_audio_bytes=6, audio_fetch_timeout_s=7).fetch_limits("audio") == FetchLimits(6, 7)
    assert MediaConfig(max_video_bytes=8, video_fetch_timeout_s=9).fetch_limits("video") == FetchLimits(8, 9)
