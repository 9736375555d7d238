import base64, os, pytest, io
from corpus import chat, data_url, media_part
from video_clips import clip
from media_files import picture
from tiny_families import FAMILIES
from gateway_process import gateway_process
from medialane.config import Config
from medialane.arena.config import ArenaConfig
from medialane.media import MediaConfig
from medialane.prepare.config import PrepareConfig
from medialane.testing.tiny_model import cache_folder
import json
pytestmark = pytest.mark.timeout(400)

@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_omni"])
@pytest.mark.parametrize("stages", [None])
def test_single(name, stages, tmp_path, request):
    family = FAMILIES[name]
    model = str(family.build(cache_folder(os.environ)))
    config = Config(prepare=PrepareConfig(num_preparers=1), arena=ArenaConfig(size_bytes=256 << 20))
    jpeg = picture(3)
    one = clip(1)
    def part(url, **more):
        p = media_part(url, "video_url"); p["video_url"].update(more); return p
    cases = {
        "mp4 1": part(data_url(one, "video/mp4")),
        "webm 1": part(data_url(clip(1, codec="libvpx-vp9", container="webm"), "video/mp4")),
        "gop mkv 1": part(data_url(clip(1, container="matroska"), "video/mp4")),
        "jpeg 1": part(data_url(jpeg, "video/jpeg")),
        "mp4 num_frames=1": part(data_url(clip(30), "video/mp4"), num_frames=1),
        "mp4 fps=0.01": part(data_url(clip(30), "video/mp4"), fps=0.01),
        "mp4 1 fps=2": part(data_url(one, "video/mp4"), fps=2),
        "mp4 1 num_frames=1": part(data_url(one, "video/mp4"), num_frames=1),
        "mp4 1 num_frames=4": part(data_url(one, "video/mp4"), num_frames=4),
        "mp4 2": part(data_url(clip(2), "video/mp4")),
        "mp4 3": part(data_url(clip(3), "video/mp4")),
        "jpeg 2": part("data:video/jpeg;base64," + base64.b64encode(jpeg).decode() + "," + base64.b64encode(jpeg).decode()),
    }
    ios = [None, {"video": {"num_frames": 1}}, {"video": {"num_frames": -1}}, {"video": {"fps": 1}}, {"video": {"num_frames": 1, "video_backend": "opencv_dynamic"}}, {"video": {"video_backend": "opencv_dynamic"}}]
    kws = [None, {"do_sample_frames": True}, {"fps": 2, "do_sample_frames": True}]
    with gateway_process(model, config, tmp_path, (*family.flags,)) as gateway:
        for what, p in cases.items():
            for io_ in ios:
              for kw in kws if io_ is None else [None]:
                body = json.loads(chat(gateway.model, p))
                if io_: body["media_io_kwargs"] = io_
                if kw: body["mm_processor_kwargs"] = kw
                a = gateway.ask(json.dumps(body).encode())
                print(name, what, io_, kw, a.status, a.code, "" if a.status == 200 else a.body[:160])
