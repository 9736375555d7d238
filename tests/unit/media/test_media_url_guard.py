import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from medialane.media import MediaConfig
from medialane.media.url_guard import UrlGuard
from medialane.types.errors import (
    InvalidMediaUrl,
    MedialaneError,
    MediaUrlForbidden,
    UnsupportedUrlScheme,
    UpstreamFailed,
)

GUARD = UrlGuard(MediaConfig())
INSIDE = UrlGuard(MediaConfig(allowed_media_networks=("127.0.0.0/8", "fd00::/16")))


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com",
        "https://example.com/a/b.png?x=1&y=%2F%20",
        "HTTPS://Example.COM:443/",
        "http://example.com./",
        "http://[2a00:1450::5efe:808:808]/",
        "http://my_bucket.s3.amazonaws.com/k",
        "http://8.8.8.8/",
        "http://[2606:4700::1111]/",
        "http://[::ffff:8.8.8.8]:8080/",
        "http://localhost/",
        "http://xn--bcher-kva.example/",
        "http://example.com/bücher.png",
    ],
)
def test_public_urls_pass(url):
    parsed = GUARD.parse(url)
    assert parsed.scheme in ("http", "https")


def test_signed_url_is_requested_byte_for_byte():
    url = "https://example.com/a%2fb/~%7e;x=1?sig=a+b%2B/==&e=%e4"
    assert str(GUARD.parse(url)) == url


@pytest.mark.parametrize(
    ("url", "requested"),
    [
        ("http://example.com/a b.png", "http://example.com/a%20b.png"),
        ("http://example.com/b\u00fccher.png?q=\u00fc", "http://example.com/b%C3%BCcher.png?q=%C3%BC"),
        ("http://b\u00fccher.example/", "http://xn--bcher-kva.example/"),
        ("HTTP://B\u00dcCHER.example:8080/x", "http://xn--bcher-kva.example:8080/x"),
        ("http://stra\u00dfe.example/", "http://xn--strae-oqa.example/"),
        ("http://example.com/\u00fc?sig=a%2Fb+c%3d&x=[1]", "http://example.com/%C3%BC?sig=a%2Fb+c%3d&x=[1]"),
        ("http://example.com/?u=//b\u00fccher/x", "http://example.com/?u=//b%C3%BCcher/x"),
        ('http://example.com/100%.png?a={b}|"<c>"', "http://example.com/100%25.png?a=%7Bb%7D%7C%22%3Cc%3E%22"),
    ],
)
def test_url_is_encoded_but_for_what_is_valid(url, requested):
    assert str(GUARD.parse(url)) == requested
    assert str(GUARD.parse(requested)) == requested


def test_user_in_a_url_is_refused_by_name():
    with pytest.raises(InvalidMediaUrl, match="user name"):
        GUARD.parse("https://user:secret@example.com/a.png")


def test_allowed_domain_may_be_international():
    guard = UrlGuard(MediaConfig(allowed_media_domains=("B\u00fccher.example",)))
    for host in ("b\u00fccher.example", "xn--bcher-kva.example", "XN--BCHER-KVA.example."):
        assert guard.parse(f"http://{host}/").raw_host
    with pytest.raises(MediaUrlForbidden):
        guard.parse("http://bucher.example/")


def test_fragment_is_removed():
    assert str(GUARD.parse("http://example.com/a#b")) == "http://example.com/a"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://2130706433/",
        "http://0177.0.0.1/",
        "http://0x7f.1/",
        "http://127.1/",
        "http://127.0.0.1./",
        "http://0x7f000001/",
        "http://0/",
        "http://0.0.0.0/",
        "http://[::1]/",
        "http://[::]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:7f00:1]/",
        "http://[::7f00:1]/",
        "http://[2002:7f00:1::]/",
        "http://[2001:0:7f00:1::]/",
        "http://[2001:0:4136:e378:8000:63bf:80ff:fffe]/",
        "http://[64:ff9b::7f00:1]/",
        "http://[64:ff9b:1::808:808]/",
        "http://[fe80::1%25eth0]/",
        "http://[fe80::1]/",
        "http://[fec0::1]/",
        "http://[fd00:ec2::254]/",
        "http://[ff02::1]/",
        "http://[ff0e::1]/",
        "http://[::ffff:0:808:808]/",
        "http://169.254.169.254/latest/meta-data/",
        "http://10.0.0.1/",
        "http://172.16.0.1/",
        "http://192.168.1.1/",
        "http://100.64.0.1/",
        "http://192.88.99.1/",
        "http://192.0.0.8/",
        "http://192.0.0.192/",
        "http://168.63.129.16/",
        "http://[3fff::1]/",
        "http://[2001:20::1]/",
        "http://[2a00:1450::5efe:7f00:1]/",
        "http://[2a00:1450::200:5efe:a00:1]/",
        "http://198.18.0.1/",
        "http://224.0.0.1/",
        "http://240.0.0.1/",
        "http://255.255.255.255/",
        "http://8.8.8.8:22/",
        "http://8.8.8.8:25/",
        "http://[2606:4700::1111]:6379/",
        "http://256.1.1.1/",
        "http://1.2.3.4.5/",
    ],
)
def test_private_addresses_are_forbidden(url):
    with pytest.raises(MediaUrlForbidden) as raised:
        GUARD.parse(url)
    assert "127" not in raised.value.message


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com/a.png",
        "//example.com/a.png",
        "http:",
        "http:example.com",
        "http:///a.png",
        "http://",
        "http://:80/",
        "http://user@example.com/",
        "http://user:pw@example.com/",
        "http://example.com\\@127.0.0.1/",
        "http://good\\@127.0.0.1/",
        " http://example.com/",
        "http://example.com/\t",
        "http://example.com/\r\nHost: x",
        "http://example.com/\0",
        "http://ex%61mple.com/",
        "http://①②⑦.⓪.⓪.①/",
        "http://127。0。0。1/",
        "http://bücher/\\x",
        "http://-ü.example/",
        "http://ü@example.com/",
        "http://user@ü.example/",
        "http:// example.com/",
        "http://exa mple.com/",
        "http://example.com /",
        "http://b\u00fc%63her.example/",
        "http://\ud800.example/",
        "http://example.com/\ud800",
        "http://example.com/" + "ü" * 5000,
        "http://example.com:99999/",
        "http://example.com:8o/",
        "http://example.com:80:80/",
        "http://[::1/",
        "http://[zz]/",
        "http://[1::2::3]/",
        "http://exa<mple.com/",
        "http://a..b/",
        "http://xn--a/",
        "http://.example.com/",
        "http://.../",
        "http://" + "a" * 64 + ".com/",
        "http://" + "a.b." * 64 + "com/",
        "http://example.com/" + "x" * 9000,
    ],
    ids=lambda url: url[:40],
)
def test_malformed_urls_are_invalid(url):
    with pytest.raises(InvalidMediaUrl):
        GUARD.parse(url)


@pytest.mark.parametrize(
    "scheme", ["ftp", "gopher", "javascript", "blob", "concat", "pipe", "file", "data", "ws", "view-source", "s3"]
)
def test_other_schemes_are_unsupported(scheme):
    with pytest.raises(UnsupportedUrlScheme):
        GUARD.parse(f"{scheme}:http://example.com/")


def test_allowed_network_is_open_on_any_port():
    assert INSIDE.parse("http://127.0.0.1:9/").port == 9
    assert INSIDE.parse("http://[::ffff:127.0.0.2]:9/").port == 9
    assert INSIDE.parse("http://[fd00::1]:9/").port == 9
    with pytest.raises(MediaUrlForbidden):
        INSIDE.parse("http://10.0.0.1/")


def test_allowed_ports_are_exact():
    guard = UrlGuard(MediaConfig(allowed_media_ports=(8443,)))
    guard.check_address("8.8.8.8", 8443)
    with pytest.raises(MediaUrlForbidden):
        guard.check_address("8.8.8.8", 443)


def test_allowed_domains_are_exact_and_do_not_allow_addresses():
    guard = UrlGuard(MediaConfig(allowed_media_domains=("Example.com", "127.0.0.1")))
    assert guard.parse("http://EXAMPLE.com./").host
    for url in ("http://a.example.com/", "http://example.com.evil.net/", "http://8.8.8.8/", "http://127.0.0.1/"):
        with pytest.raises(MediaUrlForbidden):
            guard.parse(url)


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/b.png", "https://example.com/b.png"),
        ("c?d=%2F", "https://example.com/x/c?d=%2F"),
        ("//other.org/e", "https://other.org/e"),
        ("https://other.org/f", "https://other.org/f"),
        ("/a b?c=%2F d", "https://example.com/a%20b?c=%2F%20d"),
        ("//b\u00fccher.example/\u00fc", "https://xn--bcher-kva.example/%C3%BC"),
        ("/\udce4.png", "https://example.com/%E4.png"),
    ],
)
def test_redirects_are_followed(location, target):
    assert str(GUARD.follow(URL("https://example.com/x/a.png"), location)) == target


@pytest.mark.parametrize(
    ("location", "error"),
    [
        (None, UpstreamFailed),
        ("http://127.0.0.1/", MediaUrlForbidden),
        ("//127.0.0.1/", MediaUrlForbidden),
        ("//169.254.169.254/", MediaUrlForbidden),
        ("http://example.com/", MediaUrlForbidden),
        ("file:///etc/passwd", UnsupportedUrlScheme),
        ("data:image/png;base64,AAAA", UnsupportedUrlScheme),
        ("\\\\127.0.0.1\\x", InvalidMediaUrl),
        ("//user@example.com/", InvalidMediaUrl),
        (" //127.0.0.1/", InvalidMediaUrl),
        ("//127.0.0.1 .example.com/", InvalidMediaUrl),
        ("//①②⑦.⓪.⓪.①/", InvalidMediaUrl),
        ("https://", InvalidMediaUrl),
    ],
)
def test_redirects_are_checked_by_the_whole_policy(location, error):
    with pytest.raises(error):
        GUARD.follow(URL("https://example.com/x/a.png"), location)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "fe80::1%eth0", "169.254.169.254", "64:ff9b::a00:1"])
def test_no_socket_is_created_for_a_private_address(address):
    family = 10 if ":" in address else 2
    with pytest.raises(MediaUrlForbidden):
        GUARD.open_socket((family, 1, 6, "", (address, 80)))


@settings(max_examples=300, deadline=None)
@given(st.text("htps:/\\@[]%.?#0127xfaé\t-", max_size=40).map(lambda rest: "http://" + rest) | st.text(max_size=40))
def test_any_text_is_parsed_or_rejected(url):
    try:
        parsed = GUARD.parse(url)
    except MedialaneError as error:
        assert error.status == 400  # noqa: PT017 - refused is as good as parsed
    else:
        assert parsed.host
        assert parsed.user is None
