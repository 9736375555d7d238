import pytest
from multidict import CIMultiDict

from medialane.media.http_cache import Freshness, freshness_of

DATE = "Tue, 15 Nov 1994 08:12:31 GMT"
LATER = "Tue, 15 Nov 1994 08:13:31 GMT"


@pytest.mark.parametrize(
    ("headers", "lifetime_s"),
    [
        ({}, None),
        ({"Cache-Control": "public"}, None),
        ({"Cache-Control": "max-age=60"}, 60),
        ({"Cache-Control": "Public, MAX-AGE=60"}, 60),
        ({"Cache-Control": 'max-age="60"'}, 60),
        ({"Cache-Control": "max-age=60, s-maxage=5"}, 5),
        ({"Cache-Control": "max-age=60", "Age": "20"}, 40),
        ({"Cache-Control": "max-age=60", "Age": "90"}, 0),
        ({"Cache-Control": "max-age=60", "Age": "x"}, 60),
        ({"Cache-Control": "max-age=60, no-cache"}, 0),
        ({"Cache-Control": "max-age=-5"}, 0),
        ({"Cache-Control": "max-age=abc"}, 0),
        ({"Cache-Control": "max-age=" + "9" * 5000}, 9_999_999_999),
        ({"Cache-Control": "max-age"}, 0),
        ({"Expires": LATER, "Date": DATE}, 60),
        ({"Expires": DATE, "Date": LATER}, 0),
        ({"Expires": LATER}, 0),
        ({"Expires": "0", "Date": DATE}, 0),
        ({"Expires": "Thu, 01 Jan 2020 00:00:00 +99999999999999", "Date": DATE}, 0),
        ({"Expires": "Thu, 01 Jan 99999999999999999999 00:00:00 GMT", "Date": DATE}, 0),
        ({"Expires": LATER, "Date": DATE, "Cache-Control": "max-age=5"}, 5),
    ],
    ids=lambda value: str(value)[:60],
)
def test_lifetime_follows_the_cache_headers(headers, lifetime_s):
    assert freshness_of(CIMultiDict(headers)) == Freshness(lifetime_s=lifetime_s)


@pytest.mark.parametrize(
    "headers",
    [
        {"Cache-Control": "no-store, max-age=60"},
        {"Cache-Control": "private, max-age=60"},
        {"Cache-Control": 'private="x"'},
        {"Cache-Control": "max-age=60", "Vary": "*"},
    ],
    ids=str,
)
def test_uncacheable_responses_are_not_stored(headers):
    assert not freshness_of(CIMultiDict(headers)).storable


def test_all_lines_of_a_header_are_considered():
    headers = CIMultiDict([("Cache-Control", "max-age=60"), ("cache-control", "no-store")])
    assert not freshness_of(headers).storable


@pytest.mark.parametrize(
    ("answer", "redirect", "both"),
    [
        (Freshness(lifetime_s=60), Freshness(lifetime_s=5), Freshness(lifetime_s=5)),
        (Freshness(lifetime_s=60), Freshness(), Freshness(lifetime_s=0)),
        (Freshness(), Freshness(lifetime_s=60), Freshness(lifetime_s=0)),
        (Freshness(lifetime_s=60), Freshness(storable=False), Freshness(storable=False, lifetime_s=0)),
    ],
)
def test_redirect_limits_the_freshness_of_its_target(answer, redirect, both):
    assert answer.through(redirect) == both
