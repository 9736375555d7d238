import pytest

from medialane.transfer import Way, ways

SHM, INLINE, URL = Way("features", "shm"), Way("features", "inline"), Way("url")


@pytest.mark.parametrize(
    ("stage", "transport", "same_host", "same_processor", "prepared", "expected"),
    [
        ("auto", "auto", True, True, True, (SHM, INLINE, URL)),
        ("auto", "auto", False, True, True, (INLINE, URL)),
        ("auto", "shm", True, True, True, (SHM, URL)),
        ("auto", "shm", False, True, True, (URL,)),
        ("auto", "inline", True, True, True, (INLINE, URL)),
        ("auto", "auto", True, False, True, (URL,)),
        ("auto", "auto", True, True, False, (URL,)),
        ("features", "auto", True, True, True, (SHM, INLINE)),
        ("features", "shm", False, True, True, ()),
        ("features", "auto", True, False, True, ()),
        ("url", "auto", True, True, True, (URL,)),
    ],
)
def test_ways_are_tried_best_first_within_what_the_operator_allows(
    stage, transport, same_host, same_processor, prepared, expected
):
    found = ways(stage, transport, same_host=same_host, same_processor=same_processor, prepared=prepared)
    assert found == expected


def test_way_is_printed_as_stage_and_transport():
    assert [str(w) for w in (SHM, INLINE, URL)] == ["features/shm", "features/inline", "url"]
