"""vLLM's KV transfers: the fields that its NIXL connector indexes, how a request is rejected, and the tokens that a
request has not computed, as its front end gets them."""

import inspect
import re
import sys
from types import SimpleNamespace

import msgspec
import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata, pull_scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.metrics.stats import PrefillStats

from medialane.vllm_bridge.engine.kv_transfer import NixlParams
from medialane.vllm_bridge.seams.engine import watch_transfers
from medialane.vllm_bridge.seams.engine_core import correct_transfers
from medialane.vllm_bridge.seams.kv_transfer import yield_cores


def test_all_fields_that_the_connector_indexes_are_checked():
    sources = [inspect.getsource(module) for module in (metadata, pull_scheduler)]
    indexed = {name for source in sources for name in re.findall(r'kv_transfer_params\["(\w+)"\]', source)}
    checked = {field.name for field in msgspec.structs.fields(NixlParams)}
    assert indexed, "vLLM reads them in another way"
    assert indexed <= checked


def test_parameters_that_the_connector_gives_are_accepted():
    """Those of `request_finished`, by their names."""
    source = inspect.getsource(pull_scheduler.NixlPullConnectorScheduler.request_finished)
    given = set(re.findall(r"(\w+)=", source[source.rindex("dict(") :]))
    required = {field.name for field in msgspec.structs.fields(NixlParams) if field.required}
    assert required <= given


def test_rejection_has_the_parameters_that_we_pass():
    parameters = inspect.signature(AsyncLLM.notify_kv_transfer_request_rejected).parameters
    assert list(parameters)[:3] == ["self", "request_id", "kv_transfer_params"]


def _no_blocks(request_id, _params):
    raise AssertionError(f"{request_id} keeps no blocks")


def test_transferred_tokens_are_noted_before_the_first_output():
    noted, processed = {}, []
    processor = SimpleNamespace(
        request_states={"inner": SimpleNamespace(external_req_id="outer")},
        process_outputs=lambda outputs, *args, **kwargs: processed.append((dict(noted), args, kwargs)) or "result",
    )
    watch_transfers(SimpleNamespace(output_processor=processor), noted.__setitem__, _no_blocks)
    stats = PrefillStats()
    stats.set(num_prompt_tokens=40, num_local_cached_tokens=16, num_external_cached_tokens=23)
    first = EngineCoreOutput("inner", [1], prefill_stats=stats)
    gone, later = EngineCoreOutput("gone", [1], prefill_stats=stats), EngineCoreOutput("inner", [2])
    assert processor.process_outputs([first, gone, later], 1.0, None, weight_version="v") == "result"
    assert processed == [({"outer": 23}, (1.0, None), {"weight_version": "v"})]


def test_kept_blocks_are_noted_even_if_their_request_was_aborted():
    noted = []
    processor = SimpleNamespace(request_states={}, process_outputs=lambda _outputs: None)
    llm = SimpleNamespace(output_processor=processor)
    watch_transfers(llm, lambda *_: None, lambda *each: noted.append(each))
    request = SimpleNamespace(request_id="outer", external_req_id=None)
    InputProcessor.assign_request_id(request)
    processor.process_outputs([EngineCoreOutput(request.request_id, [1], kv_transfer_params={"a": 1})])
    assert noted == [("outer", {"a": 1})]


def test_states_of_requests_have_the_id_by_which_they_were_made():
    assert "external_req_id" in inspect.signature(RequestState.__init__).parameters
    assert "request_states" in inspect.getsource(OutputProcessor.__init__)


def test_tokens_that_could_not_be_read_do_not_count_as_transferred(monkeypatch):
    """A failure leaves the tokens of the blocks before; later ones are computed."""
    monkeypatch.setattr(Scheduler, "_update_waiting_for_remote_kv", Scheduler._update_waiting_for_remote_kv)
    correct_transfers()
    scheduler = SimpleNamespace(
        connector="NIXL's",
        failed_recving_kv_req_ids={"failed"},
        finished_recving_kv_req_ids={"failed", "read"},
        kv_cache_manager=SimpleNamespace(cache_blocks=lambda _request, _num_tokens: None),
        needs_kv_cache_zeroing=False,
        _mark_prefix_replay=lambda _request, _num_tokens, *, window_loaded: 0,
        _load_restores_replay_window=lambda _request: False,
    )
    found = {}
    for name, num_valid in (("failed", 256), ("read", 400)):
        stats = PrefillStats()
        stats.set(num_prompt_tokens=400, num_local_cached_tokens=128, num_external_cached_tokens=272)
        request = SimpleNamespace(request_id=name, num_computed_tokens=num_valid, num_tokens=400, prefill_stats=stats)
        Scheduler._update_waiting_for_remote_kv(scheduler, request)
        found[name] = (stats.num_local_cached_tokens, stats.num_external_cached_tokens, stats.num_computed_tokens)
    assert found == {"failed": (128, 128, 144), "read": (128, 272, 0)}
    assert not scheduler.finished_recving_kv_req_ids


def test_only_engines_with_the_connector_import_nixl(monkeypatch):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    monkeypatch.setenv("UCX_RCACHE_MAX_UNRELEASED", "1024")
    monkeypatch.setattr(KVConnectorFactory, "create_connector", KVConnectorFactory.create_connector)
    monkeypatch.setattr(NixlBaseConnectorWorker, "__init__", NixlBaseConnectorWorker.__init__)
    bindings = SimpleNamespace(nixlAgentConfig=type("nixlAgentConfig", (), {}))
    yield_cores()
    for connector, is_imported in (("ExampleConnector", False), ("NixlConnector", True)):
        monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_bindings=bindings) if is_imported else None)
        transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_module_path="")
        with pytest.raises(ValueError, match="kv_connector_module_path"):
            KVConnectorFactory.create_connector(SimpleNamespace(kv_transfer_config=transfer), "role", "cache")
        config = bindings.nixlAgentConfig()
        config.pthrDelay = 0
        assert config.pthrDelay == (1000 if is_imported else 0), "microseconds"
