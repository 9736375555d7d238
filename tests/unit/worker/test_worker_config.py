import msgspec
import pytest

from medialane.types.errors import StartupFailed
from medialane.worker import WorkerConfig


def test_defaults_are_valid():
    WorkerConfig().validate()


@pytest.mark.parametrize("name", [name for name in WorkerConfig.__struct_fields__ if name.endswith("_s")])
def test_invalid_setting_is_named(name):
    with pytest.raises(StartupFailed, match=name):
        msgspec.structs.replace(WorkerConfig(), **{name: 0.0}).validate()


@pytest.mark.parametrize("wrong", [{"metrics_port": -1}, {"metrics_port": 65536}, {"metrics_host": "a b"}])
def test_invalid_metrics_address_is_named(wrong):
    with pytest.raises(StartupFailed, match=next(iter(wrong))):
        WorkerConfig(**wrong).validate()
