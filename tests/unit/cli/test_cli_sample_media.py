"""Generated audio and video: what their arguments say, decoded by other libraries' readers."""

import io

import av
import pytest
import soundfile

from medialane.testing.sample_audio import sample_audio
from medialane.testing.sample_video import sample_video


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
