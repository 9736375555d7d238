import pytest

from medialane.types.setting import ascii_host


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("localhost", "localhost"),
        ("Worker-3.example.", "Worker-3.example."),
        ("vllm_worker_1", "vllm_worker_1"),
        ("b\u00fccher.example", "xn--bcher-kva.example"),
        ("0.0.0.0", "0.0.0.0"),
        ("::", "::"),
        ("fe80::1%eth0.7", "fe80::1%eth0.7"),
        ("a" * 63, "a" * 63),
    ],
)
def test_host_is_normalised_for_resolvers(host, found):
    assert ascii_host(host) == found


@pytest.mark.parametrize(
    "host",
    [
        "", ".", "a..b", ".a", "a b", "-a", "a-", "a/b", "a@b", "a\0b", "\udcff", "*.a", "a" * 64, "\u00fc" * 63,
        "a." * 126 + "bc",
        "256.0.0.1", "1.2", "1.2.3.4.", "7", ":::", "::1%", "::1%a b", "[::1]", "host:80",
    ],
)  # fmt: skip
def test_unresolvable_host_syntax_is_a_value_error(host):
    with pytest.raises(ValueError, match="is not a host name or IP address"):
        ascii_host(host)
