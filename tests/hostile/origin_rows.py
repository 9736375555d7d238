"""Rows 23 to 35: responses of media hosts."""

from __future__ import annotations

from corpus import Row, at

_REDIRECTS = {
    "media_url_forbidden": (
        "/to-canary", "/to-canary-relative", "/to-canary-decimal", "/to-canary-6", "/to-canary-mapped",
        "/to-canary-name", "/to-canary-tls", "/to-other-port", "/to-metadata", "/to-rebound",
    ),
    "invalid_media_url": (
        "/to-user", "/to-user-at-canary", "/to-backslash", "/to-backslashes", "/to-space", "/to-long",
    ),
    "unsupported_url_scheme": ("/to-file", "/to-data", "/to-ftp", "/to-gopher"),
    "media_upstream_error": ("/to-nothing",),
    "too_many_redirects": ("/to-itself", "/to-empty"),
}  # fmt: skip

_SLOW = (
    "/slow-headers", "/slow-header-lines", "/slow-body", "/slow-chunks", "/slow-interim", "/silent",
    "/silent-after-headers", "/silent-in-body",
)  # fmt: skip

#: Floods end at a byte limit if there is one, else at the timeout.
_FLOODS = {
    "/endless": "media_too_large",
    "/endless-until-close": "media_too_large",
    "/gzip-bomb": "media_too_large",
    "/endless-crumbs": "media_fetch_timeout",
    "/endless-chunk-size": "media_fetch_timeout",
    "/endless-chunk-extension": "media_fetch_timeout",
    "/endless-trailers": "media_upstream_error",
    "/endless-interim": "media_upstream_error",
    "/endless-header": "media_upstream_error",
    "/endless-header-name": "media_upstream_error",
    "/endless-headers": "media_upstream_error",
    "/endless-reason": "media_upstream_error",
    "/endless-blank-lines": "media_fetch_timeout",
}

_NO_HTTP = (
    "/large-header", "/many-headers", "/no-http", "/http-0.9", "/nul-header", "/status-99999", "/status-none",
    "/switching", "/negative-length", "/two-lengths", "/length-and-chunked", "/unknown-transfer-coding", "/short-body",
    "/cut-chunk", "/bad-chunk", "/gzip-of-none", "/coding-chain", "/coding-unknown", "/gzip-transfer", "/reset",
    "/hang-up", "/partial", "/not-modified", "/300", "/304",
)  # fmt: skip

_STATUSES = {
    "too_many_redirects": 422, "media_too_large": 413, "media_upstream_error": 502, "media_fetch_timeout": 504,
}  # fmt: skip

_GOOD = (
    "/good.jpg", "/to-good", "/interim", "/until-close", "/jpeg-as-html", "/odd-expiry", "/odd-date", "/odd-age",
    "/odd-directives", "/odd-tag", "/cookies", "/gzip", "/deflate", "/whole", "/203", "/to-spaces",
)  # fmt: skip

ORIGIN_ROWS = (
    *(
        Row(f"24-26 {path}", at("http://{host}" + path), _STATUSES.get(code, 400), code)
        for code, paths in _REDIRECTS.items()
        for path in paths
    ),
    Row("+ from https to http", at("https://127.0.0.2:{tls}/to-good"), 502, "media_upstream_error"),
    *(Row(f"27-28 {path}", at("http://{host}" + path), 504, "media_fetch_timeout", seconds=8) for path in _SLOW),
    *(
        Row(f"29 {path}", at("http://{host}" + path), _STATUSES[code], code, seconds=8)
        for path, code in _FLOODS.items()
    ),
    Row("30 declared 10 GB", at("http://{host}/declared-10-gb"), 413, "media_too_large"),
    Row("+ declared 2^64", at("http://{host}/declared-2-64"), 502, "media_upstream_error"),
    Row("+ declared with 5000 digits", at("http://{host}/declared-digits"), 502, "media_upstream_error"),
    *(Row(f"31-34 {path}", at("http://{host}" + path), 502, "media_upstream_error") for path in _NO_HTTP),
    *(
        Row(f"33 /{number}", at(f"http://{{host}}/{number}"), 422, "media_fetch_failed")
        for number in (400, 401, 403, 404, 407, 410, 418, 451)
    ),
    *(
        Row(f"33 /{number}", at(f"http://{{host}}/{number}"), 502, "media_upstream_error")
        for number in (429, 500, 502, 503, 504, 599)
    ),
    Row("+ retry after an age", at("http://{host}/odd-retry"), 502, "media_upstream_error"),
    Row("+ retry after a date", at("http://{host}/odd-retry-date"), 502, "media_upstream_error"),
    Row("34 refused", at("http://127.0.0.2:{closed}/"), 502, "media_upstream_error"),
    Row("34 unknown name", at("http://nowhere.invalid:{closed}/"), 502, "media_upstream_error"),
    Row("34 certificate of an unknown authority", at("https://127.0.0.2:{tls}/good.jpg"), 502, "media_upstream_error"),
    Row("34 no TLS", at("https://{host}/good.jpg"), 502, "media_upstream_error"),
    Row("+ TLS where HTTP is wanted", at("http://127.0.0.2:{tls}/good.jpg"), 502, "media_upstream_error"),
    *(
        Row(f"35 {path}", at("http://{host}" + path), 415, "unsupported_media_type")
        for path in ("/html", "/html-as-jpeg", "/gzip-unsaid")
    ),
    *(
        Row(f"57 {path}", at("http://{host}" + path), 400, "empty_media")
        for path in ("/empty", "/refresh", "/no-content", "/201")
    ),
    *(Row(f"+ {path}", at("http://{host}" + path), 200) for path in _GOOD),
    Row("23 good name", at("http://good.test:{origin}/good-once.jpg"), 200),
)
