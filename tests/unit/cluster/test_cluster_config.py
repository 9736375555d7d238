import pytest

from medialane.config import ClusterConfig, as_environ, load_config
from medialane.types.errors import StartupFailed


@pytest.mark.parametrize(("num_cores", "expected"), [(1, 1), (2, 1), (7, 1), (8, 2), (32, 8), (192, 8)])
def test_automatic_number_of_gateways_follows_the_cores(num_cores, expected):
    assert ClusterConfig(num_gateways="auto").resolved_num_gateways(num_cores) == expected


def test_given_number_of_gateways_does_not_depend_on_the_cores():
    assert ClusterConfig().resolved_num_gateways(192) == 1
    assert ClusterConfig(num_gateways=3).resolved_num_gateways(1) == 3


@pytest.mark.parametrize("value", ["auto", "3"])
def test_number_of_gateways_reaches_another_process(value):
    config = load_config({"gateways": value}, environ={})
    assert load_config(environ=as_environ(config)).cluster == config.cluster
    assert str(config.cluster.num_gateways) == value


@pytest.mark.parametrize(
    ("value", "reason"),
    [("0", "--gateways must be at least 1, or auto"), ("many", "--gateways 'many': must be a whole number or auto")],
)
def test_invalid_number_of_gateways_is_refused_by_name(value, reason):
    with pytest.raises(StartupFailed, match=reason):
        load_config({"gateways": value}, environ={}, sections=["cluster"])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"ray": True, "single-gpu": True}, "--single-gpu is for workers of this host, without --ray"),
        ({"address": "10.0.0.1:6379"}, "--address needs --ray"),
        ({"ray": "true", "address": "10.0.0.1"}, "--address: '10.0.0.1' must be HOST:PORT, such as"),
        ({"gpus-per-worker": "-1"}, "--gpus-per-worker must not be negative"),
        ({"gpus-per-worker": "half"}, "--gpus-per-worker 'half': must be a whole number or auto"),
        ({"cpus-per-worker": "0"}, "--cpus-per-worker must be positive"),
    ],
)
def test_settings_of_ray_are_checked_by_name(flags, reason):
    with pytest.raises(StartupFailed, match=reason):
        load_config(flags, environ={}, sections=["cluster"])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"encoders": "-1"}, "--encoders must not be negative"),
        ({"encoders": "some"}, "--encoders 'some': must be a whole number"),
        ({"encoders": "1", "ray": True}, "--encoders is for this host, without --ray"),
        ({"encoders": "1", "encoder-gpu-share": "1"}, "--encoder-gpu-share must be less than 1"),
        ({"encoders": "1", "encoder-gpu-share": "-0.1"}, "--encoder-gpu-share must not be negative"),
        ({"encoder-gpu-share": "0.2"}, "--encoder-gpu-share needs --encoders"),
    ],
)
def test_settings_of_encoders_are_checked_by_name(flags, reason):
    with pytest.raises(StartupFailed, match=reason):
        load_config(flags, environ={}, sections=["cluster"])
