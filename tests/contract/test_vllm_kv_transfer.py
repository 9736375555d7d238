"""vLLM's KV transfers: the fields that its NIXL connector indexes, how a request is rejected, and the tokens that a
request has not computed, as its front end gets them."""

import inspect
import re
from types import SimpleNamespace

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata, pull_scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.metrics.stats import PrefillStats

from medialane.vllm_bridge.engine.kv_transfer import NixlParams
from medialane.vllm_bridge.seams.engine import watch_transfers


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
