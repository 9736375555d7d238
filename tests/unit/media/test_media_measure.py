"""Items are measured without being decoded, or by decoding them: their sizes are as in what `decode` returns."""

import msgspec
import numpy as np
import pytest
import soundfile

from audio_maker import by_ffmpeg, by_libsndfile, tones
from medialane.media import MediaConfig, decode, measure, sniff
from medialane.media.video_capture import Capture
from medialane.types.errors import InvalidAudio, InvalidVideo, VideoTooLarge
from medialane.types.media import FrameBatch, MediaSize
from video_clips import broken, clip, remux

CONFIG = MediaConfig()


class Sampler:
    """Samples every third frame, and describes them as vLLM's samplers do."""

    def sample(self, video, io):
        num_frames = video.source.num_frames
        frames, indices = video.read(range(0, num_frames, 3))
        metadata = {"total_num_frames": num_frames, "fps": video.source.fps, "frames_indices": indices}
        return FrameBatch(np.ascontiguousarray(frames), msgspec.json.encode(metadata))


def sizes(data, modality, *, io=b"{}", config=CONFIG):
    """What both functions say of an item's size: as measured, as decoded. An error is its type."""
    given = {"media_type": sniff(data, modality, config), "io": io, "config": config, "sampler": Sampler()}

    def of(call):
        try:
            result = call(memoryview(data), modality, **given)
        except (InvalidVideo, InvalidAudio) as error:
            return type(error)
        return result if isinstance(result, MediaSize) else result.size

    return of(measure), of(decode)


VIDEOS = {
    "plain": clip(30),
    "of B-frames": clip(30, b_frames=2),
    "rotated": clip(20, rotation=90),
    "upside down": clip(20, rotation=180),
    "VP9": clip(20, codec="libvpx-vp9", container="webm"),
    "VP8": clip(20, codec="libvpx", container="webm"),
    "of one frame": clip(1),
    "at irregular times": clip(5, pts=[0, 3, 4, 9, 12], ticks=25),
    "with hidden frames": remux(clip(30, b_frames=2), shift=-3),
    "without its first keyframe": remux(clip(30), drop=4),
    "damaged": broken(clip(30)),
}


@pytest.mark.parametrize("data", VIDEOS.values(), ids=VIDEOS)
def test_size_of_a_video_is_that_of_its_frames(data):
    measured, decoded = sizes(data, "video")
    assert measured == decoded


def test_one_frame_of_a_plain_video_is_decoded_to_measure_it(monkeypatch):
    jump, jumps = Capture.jump, []

    def noted(capture, table, indices):
        jumps.append(list(indices))
        return jump(capture, table, indices)

    monkeypatch.setattr(Capture, "jump", noted)
    sizes(clip(30), "video")
    assert jumps == [[0], list(range(0, 30, 3))]


def test_limits_hold_for_frames_that_are_not_decoded():
    with pytest.raises(VideoTooLarge):
        sizes(clip(30), "video", config=MediaConfig(max_video_decoded_bytes=20_000))


STEREO = tones(44100, 2, 0.7)
AUDIO = {
    **{name: by_libsndfile(STEREO, 44100, "WAV", name) for name in ("PCM_U8", "PCM_16", "PCM_24", "FLOAT", "ULAW")},
    "MS_ADPCM": by_libsndfile(STEREO, 44100, "WAV", "MS_ADPCM"),
    "cut off": by_libsndfile(STEREO, 44100)[:60_001],
    "FLAC": by_libsndfile(STEREO, 44100, "FLAC"),
    "MP3": by_libsndfile(STEREO, 44100, "MP3"),
    "Vorbis": by_libsndfile(STEREO, 44100, "OGG"),
    "AAC": by_ffmpeg(STEREO, 44100, "mp4", "aac"),
    "empty": by_libsndfile(STEREO[:0], 44100),
}


@pytest.mark.parametrize("io", [b"{}", b'{"sample_rate":16000}'])
@pytest.mark.parametrize("data", AUDIO.values(), ids=AUDIO)
def test_size_of_audio_is_that_of_its_samples(data, io):
    measured, decoded = sizes(data, "audio", io=io)
    assert measured == decoded


def test_samples_of_wav_are_counted_without_reading_them(monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("samples are read")

    monkeypatch.setattr(soundfile.SoundFile, "read", refuse)
    data = AUDIO["PCM_16"]
    measured = measure(memoryview(data), "audio", media_type="audio/wav", io=b"{}", config=CONFIG, sampler=Sampler())
    assert measured == MediaSize(num_samples=len(STEREO), sample_rate=44100)
