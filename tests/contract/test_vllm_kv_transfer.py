"""vLLM's KV transfers: the fields that its NIXL connector indexes, how a request is rejected, and the tokens that a
request has not computed, as its front end gets them."""

import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
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

HAS_NIXL = find_spec("nixl") is not None


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


CORRECT = """
import sys
from types import SimpleNamespace
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import PrefillStats
Scheduler._update_waiting_for_remote_kv = lambda self, request: self.failed_recving_kv_req_ids.discard("r")
from medialane.vllm_bridge.seams.engine_core import correct_transfers
correct_transfers()
stats = PrefillStats()
stats.set(num_prompt_tokens=400, num_local_cached_tokens=128, num_external_cached_tokens=271)
request = SimpleNamespace(request_id="r", num_computed_tokens=256, prefill_stats=stats)
scheduler = SimpleNamespace(failed_recving_kv_req_ids={"r"})
for _ in range(2):
    Scheduler._update_waiting_for_remote_kv(scheduler, request)
    print(stats.num_local_cached_tokens, stats.num_external_cached_tokens, stats.num_computed_tokens)
    request.num_computed_tokens = 399
"""


def test_tokens_that_could_not_be_read_do_not_count_as_transferred():
    """A failure leaves the tokens of the blocks before; later ones are computed."""
    assert run_program(CORRECT) == ["128 128 144", "128 128 144"]


NO_NIXL = """
import sys
from types import SimpleNamespace
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
KVConnectorFactory.create_connector = lambda config, role, cache: (role, cache)
from medialane.vllm_bridge.seams.kv_transfer import yield_cores
yield_cores()
for connector in (None, SimpleNamespace(has_connector=lambda _: False), SimpleNamespace(has_connector=lambda _: True)):
    made = KVConnectorFactory.create_connector(SimpleNamespace(kv_transfer_config=connector), "role", "cache")
    print(*made, "nixl" in sys.modules)
"""


def test_only_engines_with_the_connector_import_nixl(monkeypatch):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    assert run_program(NO_NIXL) == ["role cache False", "role cache False", f"role cache {HAS_NIXL}"]


def run_program(source):
    """Return its lines."""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
