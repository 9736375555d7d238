from typing import get_args

import msgspec
import pytest

from medialane.config import Config, SectionName, load_config, settings
from medialane.types.errors import StartupFailed


def load(flags, *, sections):
    return load_config(flags, environ={}, sections=sections)


def test_every_field_has_an_explicit_name():
    """A field without one would have its Python name as its flag."""
    assert [s.name for s in settings() if "_" in s.name or not s.name.replace("-", "").isalpha()] == []


def test_name_of_a_section_is_its_field_of_the_configuration():
    assert list(dict.fromkeys(s.section for s in settings())) == list(get_args(SectionName))


def test_flag_variable_and_file_key_share_one_name():
    arena = next(s for s in settings() if s.field == "size_bytes")
    assert (arena.name, arena.flag, arena.variable) == ("arena-size", "--arena-size", "MEDIALANE_ARENA_SIZE")


def test_flags_of_the_command_line_have_their_documented_names():
    names = {s.flag for s in settings()}
    assert {"--workers", "--preparers", "--host", "--port", "--arena-size", "--stage", "--transport"} <= names
    assert {"--single-gpu", "--log-level", "--rpc-secret-file", "--allow-media-network"} <= names


def test_every_setting_has_a_unique_name_and_a_description():
    found = settings()
    assert len({s.name for s in found}) == len(found)
    assert [s.name for s in found if not s.description] == []


def test_validation_error_uses_the_flag_name():
    with pytest.raises(StartupFailed, match="--workers must not be negative"):
        load({"workers": "-1"}, sections=("cluster",))
    with pytest.raises(StartupFailed, match="--restart-initial must be positive and at most --restart-max"):
        load({"restart-initial": "0"}, sections=("cluster",))


def test_sections_not_used_by_a_command_are_not_validated():
    assert load({"workers": "-1"}, sections=("server",)).cluster.num_workers == -1


def test_configuration_is_frozen():
    with pytest.raises(AttributeError):
        Config().server.port = 1
    assert msgspec.structs.replace(Config().server, port=1).port == 1
