import msgspec
import pytest

from medialane.core.errors import StartupFailed
from medialane.worker import WorkerConfig


def test_defaults_are_valid():
    WorkerConfig().validate()


@pytest.mark.parametrize("name", WorkerConfig.__struct_fields__)
def test_invalid_setting_is_named(name):
    with pytest.raises(StartupFailed, match=name):
        msgspec.structs.replace(WorkerConfig(), **{name: 0.0}).validate()
