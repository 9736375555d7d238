"""`medialane render`: which processes it starts, with which settings."""

import argparse

import pytest

from medialane.cli import render
from medialane.cluster import Hardware, local
from medialane.config import Config, load_config
from medialane.types.errors import StartupFailed


def parsed(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.set_defaults(argv=list(words), vllm_args=[], secret_flags=[])
    render.add_arguments(parser)
    return parser.parse_args(["model", *words])


def test_a_store_and_gateways_start_and_no_worker(tmp_path):
    config = render.without_workers(load_config({"gateways": "2"}))
    specs = local.process_specs(config, "model", [], local.HostRun(tmp_path, Hardware((), 2), {}))
    assert [spec.name for spec in specs] == ["warm process", "store", "gateway 0", "gateway 1"]
    assert specs[-1].environ["MEDIALANE_RENDER_ONLY"] == "true"


def test_addresses_are_accepted_without_a_way_for_workers_to_join():
    local.check_addresses(render.without_workers(Config()), [])


def test_workers_configured_for_serve_do_not_start():
    config = render.without_workers(load_config({"workers": "3", "encoders": "1", "join-listen": "127.0.0.1:7000"}))
    assert (config.cluster.num_workers, config.cluster.num_encoders, config.gateway.join_listen) == (0, 0, "")


@pytest.mark.parametrize("flags", [("--workers", "2"), ("--ray",), ("--join-listen", "127.0.0.1:7000")])
def test_flag_for_workers_is_refused(flags):
    with pytest.raises(StartupFailed, match=flags[0]):
        render.run(parsed(*flags))
