import pytest

from kept_names import KeptNames
from medialane.arena import NamesArea
from medialane.media.http_cache import KnownUrl, UrlCache, Validators, url_key
from medialane.store import Aliases
from medialane.types.media import Alias

HASH = "ab" * 32
TAGGED = Validators(b"a", '"1"', None)


def test_url_is_known_until_stale():
    cache = UrlCache(10)
    cache.put(b"k", KnownUrl(HASH, fresh_until=5.0), now=0.0)
    assert cache.fresh(b"k", now=4.9).content_hash == HASH
    assert cache.fresh(b"k", now=5.0) is None


def test_stale_url_keeps_its_validators():
    cache = UrlCache(10)
    cache.put(b"k", KnownUrl(HASH, fresh_until=0.0, validators=TAGGED), now=0.0)
    assert cache.fresh(b"k", now=0.0) is None
    assert cache.get(b"k").validators == TAGGED


def test_entry_neither_fresh_nor_revalidatable_is_not_stored():
    cache = UrlCache(10)
    cache.put(b"k", KnownUrl(HASH, fresh_until=9.0), now=0.0)
    cache.put(b"k", KnownUrl(HASH, fresh_until=0.0), now=0.0)
    assert len(cache) == 0


def test_least_recently_used_url_is_evicted():
    cache = UrlCache(2)
    for key in (b"a", b"b"):
        cache.put(key, KnownUrl(HASH, 9.0), now=0.0)
    cache.get(b"a")
    cache.put(b"c", KnownUrl(HASH, 9.0), now=0.0)
    assert [cache.get(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]


def test_zero_capacity_stores_nothing():
    cache = UrlCache(0)
    cache.put(b"a", KnownUrl(HASH, 9.0), now=0.0)
    assert len(cache) == 0


def test_url_can_be_forgotten():
    cache = UrlCache(2)
    cache.put(b"a", KnownUrl(HASH, 9.0), now=0.0)
    cache.forget(b"a")
    cache.forget(b"a")
    assert cache.get(b"a") is None


def test_keys_are_separate_per_tenant():
    keys = {url_key("http://a/", ""), url_key("http://a/", "t"), url_key("http://a/t", ""), url_key("http://b/", "")}
    assert len(keys) == 4


def test_validators_must_exist_and_be_short():
    assert TAGGED.usable
    assert Validators(b"u", None, "Tue").usable
    assert not Validators(b"u", None, None).usable
    assert not Validators(b"u", "x" * 600, None).usable


def test_next_process_knows_urls():
    kept = KeptNames()
    before = UrlCache(10, kept)
    validators = Validators(b"t" * 16, '"' + "e" * 40 + '"', "Tue, 24 Nov 2026 00:00:00 GMT")
    known = KnownUrl(HASH, fresh_until=5.0, lifetime_s=60.0, validators=validators)
    before.put(b"k", known, now=0.0)
    before.put(b"l", KnownUrl(HASH, fresh_until=5.0), now=0.0)
    before.forget(b"l")
    after = UrlCache(10, kept)
    assert after.get(b"k") == known
    assert after.fresh(b"k", now=5.0) is None
    assert len(after) == 1


def test_url_that_must_be_fetched_again_is_not_kept():
    kept = KeptNames()
    cache = UrlCache(10, kept)
    cache.put(b"k", KnownUrl(HASH, fresh_until=9.0), now=0.0)
    cache.put(b"k", KnownUrl(HASH, fresh_until=0.0), now=0.0)
    assert not kept


@pytest.mark.parametrize("etag", ["x" * 200, "\udce9"])
def test_validators_that_are_long_or_odd_are_not_kept_with_the_url(etag):
    kept = KeptNames()
    cache = UrlCache(10, kept)
    known = KnownUrl(HASH, fresh_until=9.0, validators=Validators(b"t" * 16, etag, None))
    cache.put(b"k", known, now=0.0)
    assert cache.get(b"k") == known
    assert UrlCache(10, kept).get(b"k") == KnownUrl(HASH, fresh_until=9.0)


def test_evicted_url_is_not_kept_and_a_lower_limit_holds():
    kept = KeptNames()
    cache = UrlCache(2, kept)
    for key in (b"a", b"b", b"c"):
        cache.put(key, KnownUrl(HASH, 9.0), now=0.0)
    assert set(kept) == {b"b", b"c"}
    assert len(UrlCache(1, kept)) == len(kept) == 1


def test_every_record_of_urls_and_uuids_fits(tmp_path):
    urls, uuids = KeptNames(), KeptNames()
    validators = Validators(b"t" * 16, "e" * 40, "m" * 40)
    UrlCache(1, urls).put(b"k", KnownUrl(HASH, 1e9, 1e9, validators), now=0.0)
    options = b'{"min_pixels":3136,"max_pixels":12845056}'
    aliases = Aliases(max_aliases=1, ttl_s=1, records=uuids)
    aliases.bind("", Alias("u", "video", io=b'{"fps":2.0,"num_frames":32}', options=options), HASH)
    (path := tmp_path / "arena").write_bytes(bytes(8192))
    kept = {"url": max(urls.values(), key=len), "uuid": max(uuids.values(), key=len)}
    area = NamesArea(path, first_byte=8192, nonce=b"n" * 16, max_records=2)
    for kind, payload in kept.items():
        area.records(kind).write(b"k" * 32, payload)
    area.close()
    area = NamesArea(path, first_byte=8192, nonce=b"n" * 16, max_records=2)
    assert {kind: dict(area.records(kind).read()) for kind in kept} == {
        kind: {b"k" * 32: payload} for kind, payload in kept.items()
    }
    area.close()
