from medialane.testing.simulated.scheduler import EncoderCache


def test_item_is_cached_after_its_request_until_evicted():
    cache = EncoderCache(10)
    assert cache.make_room(6)
    cache.add("a", 6, "r1")
    cache.release("a", "r1")
    assert "a" in cache
    assert cache.make_room(5)
    assert "a" not in cache


def test_item_in_use_is_not_evicted():
    cache = EncoderCache(10)
    cache.add("a", 6, "r1")
    assert not cache.make_room(5)
    assert "a" in cache


def test_eviction_is_least_recently_released_and_use_makes_recent():
    cache = EncoderCache(10)
    for name in "ab":
        cache.add(name, 5, "r")
        cache.release(name, "r")
    assert cache.use("a", "r2")
    cache.release("a", "r2")
    assert cache.make_room(5)
    assert "a" in cache
    assert "b" not in cache


def test_item_with_two_users_is_evictable_after_both():
    cache = EncoderCache(10)
    cache.add("a", 6, "r1")
    assert cache.use("a", "r2")
    cache.release("a", "r1")
    assert not cache.make_room(5)
    cache.release("a", "r2")
    cache.release("a", "r2")
    assert cache.make_room(10)


def test_absent_item_cannot_be_used():
    assert not EncoderCache(10).use("a", "r")
