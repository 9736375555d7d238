import pytest

from medialane.types.errors import StartupFailed
from medialane.wire import TcpAddress, UnixAddress, format_tcp, parse_address, parse_named, parse_tcp, parse_unix


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("unix:/run/w.sock", UnixAddress("/run/w.sock")),
        ("tcp://10.0.0.1:7000", TcpAddress("10.0.0.1", 7000)),
        ("tcp://worker-3.example:0", TcpAddress("worker-3.example", 0)),
        ("tcp://[::1]:7000", TcpAddress("::1", 7000)),
        ("10.0.0.1:7000", TcpAddress("10.0.0.1", 7000)),
        ("worker-3.example:0", TcpAddress("worker-3.example", 0)),
        ("[::1]:7000", TcpAddress("::1", 7000)),
        ("tcp://[fe80::1%eth0]:7000", TcpAddress("fe80::1%eth0", 7000)),
        ("tcp://worker_1.:7000", TcpAddress("worker_1.", 7000)),
        ("tcp://b\u00fccher.example:7000", TcpAddress("xn--bcher-kva.example", 7000)),
    ],
)
def test_address_is_parsed(address, parsed):
    assert parse_address(address) == parsed


@pytest.mark.parametrize(
    "address",
    [
        "", "w.sock", "/run/w.sock", "unix:", "unix:relative.sock", "unix:/a\0b", "tcp://", "tcp://host", "tcp://:7000",
        "tcp://host:", "tcp://host:http", "tcp://host:65536", "tcp://host:-1", "tcp://::1:7000", "http://host:1",
        "tcp://host:\u0663", "unix:/" + "a" * 107, "unix:/\ud800", "tcp://host:" + "9" * 5000,
        "tcp://[::1:7000", "tcp://[worker]:7000", "tcp://[10.0.0.1]:7000", "tcp://[1:2]:7000",
        "tcp://a..b:7000", "tcp://.:7000", "tcp://a b:7000", "tcp://user@host:7000", "tcp://host/path:7000",
        "tcp://10.0.0.256:7000", "tcp://10.1:7000", "tcp://h\0:7000", "tcp://h\udcff:7000",
        "tcp://" + "a" * 64 + ":7000", "tcp://" + "\u00fc" * 64 + ":7000", "tcp://" + "a." * 127 + "b:7000",
        "tcp://[fe80::1%\0]:7000", "tcp://[fe80::1%]:7000",
    ],
)  # fmt: skip
def test_malformed_address_error_names_the_setting_and_a_right_one(address):
    with pytest.raises(StartupFailed, match=r"^--worker: .*") as refused:
        parse_address(address, "--worker")
    assert repr(address) in refused.value.message
    assert any(right in refused.value.message for right in ("10.0.0.1:7100", "unix:/run/", "107 bytes"))


@pytest.mark.parametrize("address", ["host", "7100", ":7100", "host:", "::1:7100", "a:b:7100", "unix:/run/w.sock", ""])
def test_setting_that_is_tcp_only_says_so(address):
    with pytest.raises(StartupFailed, match=r"--join-listen: .*HOST:PORT, such as 10\.0\.0\.1:7100") as refused:
        parse_tcp(address, "--join-listen")
    assert "unix:/run" not in refused.value.message.replace(repr(address), "")


@pytest.mark.parametrize("address", ["tcp://h:1", "h:1", "/run/s.sock", "unix:s.sock", ""])
def test_setting_that_is_a_unix_socket_says_so(address):
    with pytest.raises(StartupFailed, match=r"--store: .* must be unix:/path, such as unix:/run"):
        parse_unix(address, "--store")


@pytest.mark.parametrize("address", ["tcp://h:0", "h:0"])
def test_address_to_connect_to_needs_a_port(address):
    with pytest.raises(StartupFailed, match=r"--worker: .* not 0"):
        parse_address(address, "--worker", to_connect=True)


def test_longest_unix_path_is_accepted():
    path = "/" + "a" * 106  # Linux takes 107 bytes
    assert parse_address(f"unix:{path}") == UnixAddress(path)


@pytest.mark.parametrize("target", [TcpAddress("127.0.0.1", 80), TcpAddress("::1", 80)])
def test_formatted_tcp_address_round_trips(target):
    assert parse_address(format_tcp(*target)) == target


@pytest.mark.parametrize(
    ("text", "name", "address"),
    [
        ("host/0=unix:/run/w.sock", "host/0", "unix:/run/w.sock"),
        ("unix:/run/a=b.sock", "unix:/run/a=b.sock", "unix:/run/a=b.sock"),
        ("10.0.0.2:7000", "10.0.0.2:7000", "tcp://10.0.0.2:7000"),
        ("tcp://10.0.0.2:7000", "10.0.0.2:7000", "tcp://10.0.0.2:7000"),
        ("blue=10.0.0.2:7000", "blue", "tcp://10.0.0.2:7000"),
    ],
)
def test_address_may_have_a_name(text, name, address):
    assert parse_named(text, "--worker") == (name, address)


@pytest.mark.parametrize("text", ["=unix:/run/w.sock", "a\n=unix:/run/w.sock", "blue=w.sock", "n" * 201 + "=h:1"])
def test_name_and_address_are_checked(text):
    with pytest.raises(StartupFailed, match=r"^--worker: "):
        parse_named(text, "--worker")
