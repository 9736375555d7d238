import msgspec
import pytest

from medialane.media import MediaConfig
from medialane.prepare import messages as m
from medialane.prepare.sandbox import Sandbox
from medialane.types.errors import ErrorReport, PreparationFailed
from medialane.types.media import DocumentOptions, DocumentPage, EncodedMedia, MediaSize, OpenedDocument, PageIo
from medialane.types.tensor import ArenaRange, TensorSpec
from medialane.wire import HEADER

RANGE = ArenaRange("0" * 32, 4096, 128, 1)
PDF = EncodedMedia("image", "f" * 64, "application/pdf", RANGE, 64, 10)


@pytest.mark.parametrize(
    "message",
    [
        m.Setup(b"{}", m.PreparerSetup("0" * 32, "/dev/shm", 1, MediaConfig(), 1)),
        m.Fork(3),
        m.Fork(3, True),
    ],
)
def test_control_request_round_trips(message):
    assert m.decode_control_request(msgspec.msgpack.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        m.Ready(1.5, Sandbox(files=True), 1 << 47),
        m.SetupFailed("no"),
        m.Forked(1, 2),
        m.ForkFailed(1, "no"),
        m.Exited(1, -9),
    ],
)
def test_control_report_round_trips(message):
    assert m.decode_control_report(msgspec.msgpack.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        m.ProcessItem(1, EncodedMedia("image", "f" * 64, "image/png", RANGE, 64, 10), b"{}", b"{}"),
        m.OpenItem(1, PDF),
        m.OpenItem(1, PDF, io=b"{}"),
        m.OpenItem(1, PDF, pages=DocumentOptions("1-3", dpi=100, text=False)),
        m.Range(1, RANGE),
        m.FreeTensors(1),
    ],
)
def test_job_request_round_trips(message):
    assert m.decode_job_request(m.encode_frame(message)[HEADER.size :]) == message


@pytest.mark.parametrize(
    "message",
    [
        m.PreparerReady(1),
        m.NeedRange(1, (TensorSpec("uint8", (2, 3)),), (1 << 47,), b"header", MediaSize(3, 2), 0.1, 0.2),
        m.Done(1),
        m.ItemOpened(1),
        m.ItemOpened(1, MediaSize(3, 2)),
        m.ItemOpened(1, document=OpenedDocument("c" * 64, 7, (DocumentPage(PageIo("d", 8, 7, "r", 9), "text"),))),
        m.JobFailed(1, ErrorReport("invalid_image", "no")),
    ],
)
def test_job_report_round_trips(message):
    assert m.decode_job_report(m.encode_frame(message)[HEADER.size :]) == message


def test_message_over_the_limit_is_not_sent():
    with pytest.raises(PreparationFailed, match="NeedRange"):
        m.encode_frame(m.NeedRange(1, (), (), bytes(m.MAX_FRAME_BYTES), MediaSize(), 0, 0))


def test_impossible_shape_is_rejected_on_decoding():
    body = msgspec.msgpack.encode(
        {
            "type": "NeedRange", "job_id": 1, "specs": [{"dtype": "uint8", "shape": [-1]}], "addresses": [1],
            "header": b"", "size": {}, "decode_s": 0.0, "process_s": 0.0,
        }
    )  # fmt: skip
    with pytest.raises(msgspec.ValidationError):
        m.decode_job_report(body)
