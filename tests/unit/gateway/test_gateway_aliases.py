"""A name means the content that was last sent with it, within its tenant, for a while."""

import pytest

from medialane.core.media import Alias
from medialane.gateway.aliases import Aliases, AliasTarget


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def aliases(clock):
    return Aliases(max_aliases=3, ttl_s=10, clock=clock)


def alias(uuid="u", kind="image", **options):
    return Alias(uuid, kind, **options)


def test_name_that_nobody_gave_is_unknown(aliases):
    assert aliases.find("", alias()) is None


def test_name_means_the_content_that_came_with_it_last(aliases):
    aliases.bind("", alias(), "first")
    assert aliases.find("", alias()) == AliasTarget("first", b"{}", b"{}")
    aliases.bind("", alias(), "second")
    assert aliases.find("", alias()).content == "second"
    assert len(aliases) == 1


@pytest.mark.parametrize(("salt", "other"), [("tenant", alias()), ("", alias(kind="image_embeds")), ("", alias("v"))])
def test_name_of_another_tenant_or_kind_is_another_name(aliases, salt, other):
    aliases.bind("", alias(), "content")
    assert aliases.find(salt, other) is None
    aliases.bind(salt, other, "other")
    assert (aliases.find("", alias()).content, aliases.find(salt, other).content) == ("content", "other")


def test_salt_and_name_do_not_run_into_each_other(aliases):
    aliases.bind("ab", alias("c"), "content")
    assert aliases.find("a", alias("bc")) is None


def test_options_said_with_the_name_are_remembered_until_others_are_said(aliases):
    aliases.bind("", alias(io=b'{"fps":2}', options=b'{"max_pixels":9}'), "content")
    assert aliases.find("", alias()) == AliasTarget("content", b'{"fps":2}', b'{"max_pixels":9}')
    assert aliases.find("", alias(io=b'{"fps":4}')) == AliasTarget("content", b'{"fps":4}', b'{"max_pixels":9}')
    assert aliases.find("", alias()).io == b'{"fps":2}'


def test_name_is_forgotten_when_it_is_not_used_for_a_while(aliases, clock):
    aliases.bind("", alias(), "content")
    clock.now = 9
    assert aliases.find("", alias()) is not None
    clock.now = 18
    assert aliases.find("", alias()) is not None
    clock.now = 28
    assert aliases.find("", alias()) is None
    assert len(aliases) == 0


def test_least_recently_used_name_is_forgotten_first(aliases):
    for name in "abc":
        aliases.bind("", alias(name), name)
    aliases.find("", alias("a"))
    aliases.bind("", alias("d"), "d")
    assert [aliases.find("", alias(name)) is not None for name in "abcd"] == [True, False, True, True]


def test_no_names_are_remembered_where_none_may_be():
    aliases = Aliases(max_aliases=0, ttl_s=10)
    aliases.bind("", alias(), "content")
    assert aliases.find("", alias()) is None


def test_names_of_any_length_take_the_same_memory(aliases):
    aliases.bind("", alias("x" * 1_000_000), "content")
    assert [len(key) for key in aliases._targets] == [32]
    assert aliases.find("", alias("x" * 1_000_000)).content == "content"
