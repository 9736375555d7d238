from medialane.media.http_cache import KnownUrl, UrlCache, Validators, url_key

HASH = "ab" * 32
TAGGED = Validators("http://a/", '"1"', None)


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
    assert Validators("u", None, "Tue").usable
    assert not Validators("u", None, None).usable
    assert not Validators("u", "x" * 600, None).usable
