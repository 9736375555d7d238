import pytest

from medialane.core.stage import STAGES, Stage
from medialane.gateway import transports as transport
from medialane.gateway.transports import TransferPath, transfer_paths

FEATURES, DECODED, URL = (
    [TransferPath(stage, t) for t in ("shm", "inline")] for stage in ("features", "decoded", "url")
)
FEATURES_INLINE, DECODED_INLINE, URL_INLINE = FEATURES[1:], DECODED[1:], URL[1:]


@pytest.mark.parametrize(
    ("stage", "transport", "same_host", "same_processor", "prepared", "expected"),
    [
        ("auto", "auto", True, True, True, FEATURES + URL),
        ("auto", "auto", False, True, True, FEATURES_INLINE + URL_INLINE),
        ("auto", "shm", True, True, True, FEATURES[:1] + URL[:1]),
        ("auto", "shm", False, True, True, URL_INLINE),
        ("auto", "inline", True, True, True, FEATURES_INLINE + URL_INLINE),
        ("auto", "auto", True, False, True, DECODED + URL),
        ("auto", "auto", True, True, False, DECODED + URL),
        ("features", "auto", True, True, True, FEATURES),
        ("features", "shm", False, True, True, []),
        ("features", "auto", True, False, True, []),
        ("decoded", "auto", True, False, False, DECODED),
        ("decoded", "inline", True, True, True, DECODED_INLINE),
        ("decoded", "shm", False, True, True, []),
        ("url", "auto", True, True, True, URL),
        ("url", "shm", False, True, True, URL_INLINE),
    ],
)
def test_allowed_transfer_paths_are_tried_best_first(stage, transport, same_host, same_processor, prepared, expected):
    found = transfer_paths(stage, transport, same_host=same_host, same_processor=same_processor, prepared=prepared)
    assert list(found) == expected


PULLED = [TransferPath(stage, "pull") for stage in ("features", "decoded", "url")]


@pytest.mark.parametrize(
    ("transport", "same_host", "can_pull", "expected"),
    [
        ("auto", False, True, [PULLED[0], *FEATURES_INLINE, PULLED[2], *URL_INLINE]),
        ("tcp", False, True, [PULLED[0], PULLED[2], *URL_INLINE]),
        ("nixl", False, True, [PULLED[0], PULLED[2], *URL_INLINE]),
        ("tcp", True, True, FEATURES[:1] + URL[:1]),
        ("tcp", False, False, URL_INLINE),
        ("shm", False, True, URL_INLINE),
        ("inline", False, True, FEATURES_INLINE + URL_INLINE),
        ("auto", True, True, FEATURES + URL),
    ],
)
def test_store_of_another_host_pulls_what_a_worker_here_would_map(transport, same_host, can_pull, expected):
    found = transfer_paths(
        "auto", transport, same_host=same_host, can_pull=can_pull, same_processor=True, prepared=True
    )
    assert list(found) == expected


def test_transfer_path_is_formatted_as_stage_and_transport():
    assert [str(transfer_path) for transfer_path in FEATURES + DECODED_INLINE] == [
        "features/shm",
        "features/inline",
        "decoded/inline",
    ]


def test_new_stage_needs_only_a_table_row(monkeypatch):
    row = Stage("embeddings", "embedded", (), ("shm",), same_processor=True, instead="features", fallback="features")
    monkeypatch.setitem(STAGES, "embeddings", row)
    monkeypatch.setattr(transport, "BEST_STAGE", "embeddings")
    found = transfer_paths("auto", "auto", same_host=True, same_processor=True, prepared=True)
    assert list(found) == [TransferPath("embeddings", "shm"), *FEATURES, *URL]
    elsewhere = transfer_paths("auto", "auto", same_host=False, same_processor=False, prepared=True)
    assert list(elsewhere) == [*DECODED_INLINE, *URL_INLINE]
