"""Generated audio and video: what their arguments say, decoded by other libraries' readers."""

import io

import av
import pytest
import soundfile
from PIL import Image

from medialane.testing.sample_media import sample_audio, sample_jpeg, sample_pixels, sample_video


@pytest.mark.parametrize(("rate", "container", "channels"), [(16000, "WAV", 1), (44100, "WAV", 2), (8000, "FLAC", 1)])
def test_audio_has_its_length_rate_and_channels(rate, container, channels):
    data = sample_audio(440, 0.5, rate=rate, container=container, channels=channels)
    samples, found = soundfile.read(io.BytesIO(data), always_2d=True)
    assert (samples.shape, found) == ((rate // 2, channels), rate)
    assert samples.std() > 0.01


def test_audio_of_other_pitches_differs():
    assert sample_audio(440, 0.5) != sample_audio(500, 0.5)


@pytest.mark.parametrize(
    ("num_frames", "width", "height", "fps"), [(1, 64, 48, 12), (7, 32, 160, 1), (30, 160, 120, 25)]
)
def test_video_has_its_frames_size_and_rate(num_frames, width, height, fps):
    with av.open(io.BytesIO(sample_video(3, num_frames, width, height, fps=fps))) as file:
        frames = list(file.decode(video=0))
        assert file.streams.video[0].average_rate == fps
    assert [(frame.width, frame.height) for frame in frames] == [(width, height)] * num_frames


def test_videos_of_other_seeds_differ_and_the_camera_moves():
    with av.open(io.BytesIO(sample_video(1, 2, 64, 48))) as file:
        first, second = (frame.to_ndarray(format="gray") for frame in file.decode(video=0))
    assert (first != second).any()
    assert sample_video(1, 2, 64, 48) != sample_video(2, 2, 64, 48)


def test_equal_arguments_give_equal_bytes():
    assert sample_jpeg(3, 320, 240) == sample_jpeg(3, 320, 240)


def test_different_seeds_and_sizes_give_different_images():
    pictures = {sample_jpeg(seed, width, 240) for seed in range(4) for width in (320, 321)}
    assert len(pictures) == 8


@pytest.mark.parametrize("seed", range(3))
def test_size_of_a_photo(seed):
    jpeg = sample_jpeg(seed, 1024, 768)
    assert 150_000 < len(jpeg) < 250_000
    assert Image.open(io.BytesIO(jpeg)).size == (1024, 768)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (7, 300), (300, 7)])
def test_odd_sizes_are_filled_completely(width, height):
    assert sample_pixels(0, width, height).shape == (height, width, 3)
