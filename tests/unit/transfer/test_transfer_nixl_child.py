import pytest

from medialane.transfer.nixl.mover import environment, with_tcp


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "tcp"),
        ("all", "all"),
        ("tcp", "tcp"),
        ("rc", "rc,tcp"),
        ("rc,cuda_copy", "rc,cuda_copy,tcp"),
        ("tcp,rc", "tcp,rc"),
        ("^tcp", "all"),
        ("^cma,tcp", "^cma"),
        ("^cma", "^cma"),
    ],
)
def test_tcp_is_always_among_the_transports_of_ucx(given, expected):
    assert with_tcp(given) == expected


def test_transports_are_left_to_ucx_unless_they_are_set():
    assert "UCX_TLS" not in environment({})
    assert environment({"UCX_TLS": "rc"})["UCX_TLS"] == "rc,tcp"


def test_operators_own_variables_are_kept():
    found = environment({"UCX_TCP_TX_SEG_SIZE": "8k", "UCX_NET_DEVICES": "eth1"})
    assert found["UCX_TCP_TX_SEG_SIZE"] == "8k"
    assert found["UCX_NET_DEVICES"] == "eth1"


def test_segments_sent_over_tcp_are_not_larger_than_any_peer_receives():
    """A peer with UCX's defaults, such as Dynamo's, has a buffer of 8 KiB for each."""
    assert "UCX_TCP_TX_SEG_SIZE" not in environment({})
