"""An alias refers to the content first sent with it, by its client and within its tenant, until it expires."""

import tracemalloc

import pytest

from kept_names import KeptNames
from medialane.store import Aliases, AliasTarget
from medialane.types.errors import UuidConflict
from medialane.types.media import Alias
from medialane.types.media_lease import TENANT


@pytest.fixture
def aliases(clock):
    return Aliases(max_aliases=3, ttl_s=10, clock=clock)


def alias(uuid="u", kind="image", **options):
    return Alias(uuid, kind, **options)


def test_undefined_alias_is_unknown(aliases):
    assert aliases.find("", alias()) is None


def test_alias_is_not_rebound_while_it_lives(aliases, clock):
    aliases.bind("", alias(), "first")
    clock.now += 9
    aliases.bind("", alias(), "first")
    clock.now += 9
    with pytest.raises(UuidConflict):
        aliases.bind("", alias(), "second")
    assert aliases.find("", alias()) == AliasTarget("first", b"{}", b"{}")
    clock.now += 10
    aliases.bind("", alias(), "second")
    assert aliases.find("", alias()).content == "second"
    assert len(aliases) == 1


@pytest.mark.parametrize(
    ("salt", "other"),
    [("tenant", alias()), ("", alias(kind="image_embeds")), ("", alias("v")), ("", alias(owner="other key"))],
)
def test_aliases_are_scoped_by_client_tenant_and_modality(aliases, salt, other):
    aliases.bind("", alias(), "content")
    assert aliases.find(salt, other) is None
    aliases.bind(salt, other, "other")
    assert (aliases.find("", alias()).content, aliases.find(salt, other).content) == ("content", "other")


def test_salt_and_alias_cannot_be_confused(aliases):
    aliases.bind("ab", alias("c"), "content")
    assert aliases.find("a", alias("bc")) is None


def test_alias_keeps_its_options_until_replaced(aliases):
    aliases.bind("", alias(io=b'{"fps":2}', options=b'{"max_pixels":9}'), "content")
    assert aliases.find("", alias()) == AliasTarget("content", b'{"fps":2}', b'{"max_pixels":9}')
    assert aliases.find("", alias(io=b'{"fps":4}')) == AliasTarget("content", b'{"fps":4}', b'{"max_pixels":9}')
    assert aliases.find("", alias()).io == b'{"fps":2}'


def test_unused_alias_expires(aliases, clock):
    aliases.bind("", alias(), "content")
    clock.now += 9
    assert aliases.find("", alias()) is not None
    clock.now += 9
    assert aliases.find("", alias()) is not None
    clock.now += 10
    assert aliases.find("", alias()) is None
    assert len(aliases) == 0


def test_least_recently_used_alias_is_evicted_first(aliases):
    for name in "abc":
        aliases.bind("", alias(name), name)
    aliases.find("", alias("a"))
    aliases.bind("", alias("d"), "d")
    assert [aliases.find("", alias(name)) is not None for name in "abcd"] == [True, False, True, True]


def test_zero_capacity_stores_no_aliases():
    aliases = Aliases(max_aliases=0, ttl_s=10)
    aliases.bind("", alias(), "content")
    assert aliases.find("", alias()) is None


def test_alias_length_does_not_affect_memory(aliases):
    name = "x" * 1_000_000
    tracemalloc.start()
    try:
        aliases.bind("", alias(name), "content")
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 100_000
    assert aliases.find("", alias(name)).content == "content"


def test_next_process_knows_names_until_they_expire(clock):
    kept = KeptNames()
    before = Aliases(max_aliases=3, ttl_s=10, clock=clock, records=kept)
    before.bind("", alias(options=b'{"max_pixels":9}'), "content")
    before.bind("tenant", alias("v", owner="key"), "other")
    clock.now += 6
    before.find("", alias())
    clock.now += 6
    after = Aliases(max_aliases=3, ttl_s=10, clock=clock, records=kept)
    assert len(after) == 1, "the other one has expired meanwhile"
    with pytest.raises(UuidConflict):
        after.bind("", alias(), "new")
    assert after.find("", alias()) == AliasTarget("content", b"{}", b'{"max_pixels":9}')
    clock.now += 10
    assert after.find("", alias()) is None
    assert not kept


def test_next_process_with_lower_limits_keeps_what_was_used_last(clock):
    kept = KeptNames()
    before = Aliases(max_aliases=3, ttl_s=10, clock=clock, records=kept)
    for name in "abc":
        before.bind("", alias(name), name)
        clock.now += 1
    before.find("", alias("a"))
    after = Aliases(max_aliases=2, ttl_s=4, clock=clock, records=kept)
    assert [after.find("", alias(name)) is not None for name in "abc"] == [True, False, True]
    clock.now += 4
    assert len(after) == 0


def test_evicted_name_is_not_kept(clock):
    kept = KeptNames()
    aliases = Aliases(max_aliases=1, ttl_s=10, clock=clock, records=kept)
    aliases.bind("", alias("a"), "a")
    aliases.bind("", alias("b"), "b")
    assert len(kept) == 1
    assert Aliases(max_aliases=3, ttl_s=10, clock=clock, records=kept).find("", alias("a")) is None


def test_records_contain_no_name_and_no_tenant(clock):
    kept = KeptNames()
    Aliases(max_aliases=1, ttl_s=10, clock=clock, records=kept).bind(
        "a tenant's salt", alias("a client's uuid", owner="a client's key"), "ab" * 32
    )
    ((key, payload),) = kept.items()
    assert len(key) == 32
    assert not any(secret in key + payload for secret in (b"tenant", b"uuid", b"client"))


def test_tenant_at_its_share_replaces_its_own_names_also_with_the_next_store(clock):
    kept = KeptNames()
    aliases = Aliases(max_aliases=8, ttl_s=10, tenant_share=0.5, clock=clock, records=kept)
    aliases.bind("", alias("theirs", owner=TENANT + "ben"), "content")
    aliases.bind("", alias("no tenant's"), "content")
    for number in range(20):
        aliases.bind("", alias(str(number), owner=TENANT + "ann"), "content")
    later = Aliases(max_aliases=8, ttl_s=10, tenant_share=0.5, clock=clock, records=kept)
    later.bind("", alias("20", owner=TENANT + "ann"), "content")
    for each, known in ((aliases, range(16, 20)), (later, range(17, 21))):
        assert len(each) == 6
        assert all(each.find("", alias(str(number), owner=TENANT + "ann")) for number in known)
        assert each.find("", alias("theirs", owner=TENANT + "ben"))
        assert each.find("", alias("no tenant's"))
