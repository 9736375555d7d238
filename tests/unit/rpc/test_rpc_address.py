import pytest

from medialane.core.errors import StartupFailed
from medialane.rpc.address import MAX_UNIX_PATH_BYTES, TcpAddress, UnixAddress, format_tcp, parse_address


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("unix:/run/w.sock", UnixAddress("/run/w.sock")),
        ("tcp://10.0.0.1:7000", TcpAddress("10.0.0.1", 7000)),
        ("tcp://worker-3.example:0", TcpAddress("worker-3.example", 0)),
        ("tcp://[::1]:7000", TcpAddress("::1", 7000)),
    ],
)
def test_address_is_read(address, parsed):
    assert parse_address(address) == parsed


@pytest.mark.parametrize(
    "address",
    [
        "", "w.sock", "/run/w.sock", "unix:", "unix:relative.sock", "unix:/a\0b", "tcp://", "tcp://host", "tcp://:7000",
        "tcp://host:", "tcp://host:http", "tcp://host:65536", "tcp://host:-1", "tcp://::1:7000", "http://host:1",
        "tcp://host:\u0663", "unix:/" + "a" * MAX_UNIX_PATH_BYTES,
    ],
)  # fmt: skip
def test_malformed_address_is_refused_naming_it(address):
    with pytest.raises(StartupFailed, match="worker address"):
        parse_address(address)


def test_longest_unix_path_is_accepted():
    path = "/" + "a" * (MAX_UNIX_PATH_BYTES - 1)
    assert parse_address(f"unix:{path}") == UnixAddress(path)


@pytest.mark.parametrize("target", [TcpAddress("127.0.0.1", 80), TcpAddress("::1", 80)])
def test_formatted_tcp_address_is_read_back(target):
    assert parse_address(format_tcp(*target)) == target
