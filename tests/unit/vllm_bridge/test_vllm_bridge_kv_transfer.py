"""What a worker passes to vLLM's connector for KV blocks, and what of that comes from outside."""

import asyncio
import json
import os

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from medialane.types.errors import HandoverFailed, StartupFailed
from medialane.types.request import KvTransfer
from medialane.vllm_bridge.engine.kv_transfer import (
    FOR_CONNECTOR,
    Transfers,
    apply_transfer,
    choose_address,
    encode_params,
    read_params,
    transfer_config,
)

NIXL = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu")
EXAMPLE = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both", kv_buffer_device="cpu")
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine",
    "remote_request_id": "request",
    "remote_host": "localhost",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 40,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
}


def applied(transfer, config=NIXL, **params):
    found = SamplingParams(**params)
    apply_transfer(found, transfer, config)
    return found


def test_worker_that_prefills_computes_one_token_and_nothing_else():
    grammar = StructuredOutputsParams(json="{}")
    found = applied(
        KvTransfer("send"), max_tokens=50, min_tokens=5, n=2, stop=["x"], logprobs=3, structured_outputs=grammar
    )
    assert (found.max_tokens, found.min_tokens, found.n, found.stop) == (1, 0, 1, [])
    assert (found.logprobs, found.structured_outputs) == (None, None)
    assert found.extra_args == {FOR_CONNECTOR: {"do_remote_decode": True, "do_remote_prefill": False}}


def test_log_probabilities_of_the_prompt_are_computed_by_the_worker_that_prefills():
    assert applied(KvTransfer("send"), prompt_logprobs=1).prompt_logprobs == 1
    found = applied(KvTransfer("receive"), prompt_logprobs=1)
    assert (found.prompt_logprobs, found.skip_reading_prefix_cache) == (None, False)


def test_parameters_of_one_connector_reach_the_other():
    given = encode_params({**PARAMS, "remote_prefill_cached_tokens": 7})
    found = applied(KvTransfer("receive", given), max_tokens=5, extra_args={"other": 1})
    assert found.extra_args == {"other": 1, FOR_CONNECTOR: PARAMS}
    assert found.max_tokens == 5


def test_blocks_for_several_choices_are_read_by_a_request_with_one_token():
    found = applied(KvTransfer("fetch", encode_params(PARAMS)), n=3, max_tokens=50, prompt_logprobs=1)
    assert (found.n, found.max_tokens, found.prompt_logprobs) == (1, 1, None)
    assert found.extra_args == {FOR_CONNECTOR: PARAMS}


def test_connector_without_parameters_gets_none():
    assert encode_params(None) == b""
    assert applied(KvTransfer("receive"), EXAMPLE).extra_args is None


@pytest.mark.parametrize(
    "name", ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "tp_size"]
)
def test_missing_parameter_does_not_reach_the_engine(name):
    """It would end: the connector indexes it."""
    given = {key: value for key, value in PARAMS.items() if key != name}
    assert read_params(json.dumps(given).encode(), NIXL) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_port": "5600"},
        {"remote_port": 0},
        {"remote_port": 70_000},
        {"remote_block_ids": [1, 2]},
        {"remote_block_ids": [[-1]]},
        {"remote_engine_id": ""},
        {"remote_engine_id": 5},
        {"remote_request_id": None},
        {"tp_size": 0},
        {"remote_num_tokens": -1},
        {"do_remote_prefill": "yes"},
    ],
    ids=str,
)
def test_wrong_parameter_does_not_reach_the_engine(wrong):
    assert read_params(json.dumps({**PARAMS, **wrong}).encode(), NIXL) is None


@pytest.mark.parametrize("data", [b"{", b"[]", b"null", b"\xff", b'"x"'])
def test_what_are_no_parameters_does_not_reach_the_engine(data):
    assert read_params(data, NIXL) is None
    assert read_params(data, EXAMPLE) is None


def test_worker_without_a_connector_gets_no_parameters():
    assert read_params(encode_params(PARAMS), None) is None
    assert applied(KvTransfer("send"), None).extra_args is None


def test_worker_with_a_role_has_nixl_unless_the_user_has_chosen():
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        found = transfer_config(None, role)
        fields = (found.kv_connector, found.kv_role, found.kv_load_failure_policy)
        assert fields == ("NixlConnector", kv_role, "recompute")
    assert transfer_config(EXAMPLE, "prefill") is EXAMPLE
    assert transfer_config(None, "worker") is None
    assert transfer_config(EXAMPLE, "worker") is EXAMPLE


@pytest.mark.parametrize(
    ("kv_role", "role"), [("kv_consumer", "prefill"), ("kv_producer", "decode")], ids=["prefill", "decode"]
)
def test_connector_that_cannot_do_the_role_is_refused(kv_role, role):
    given = KVTransferConfig(kv_connector="ExampleConnector", kv_role=kv_role, kv_buffer_device="cpu")
    with pytest.raises(StartupFailed, match=f"--role {role} is not possible with the kv_role {kv_role}"):
        transfer_config(given, role)


def test_engines_have_an_address_for_others_and_ports_of_their_own(monkeypatch):
    for name in ("PORT", "HOST"):  # set, so that what the test sets is removed
        monkeypatch.setenv(f"VLLM_NIXL_SIDE_CHANNEL_{name}", "")
        monkeypatch.delenv(f"VLLM_NIXL_SIDE_CHANNEL_{name}")
    choose_address(AsyncEngineArgs(model="m", kv_transfer_config=EXAMPLE), "192.0.2.1")
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in os.environ
    choose_address(AsyncEngineArgs(model="m", kv_transfer_config=NIXL), "192.0.2.1")
    assert os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "192.0.2.1"
    chosen = os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    assert 20_000 <= int(chosen) < 30_000
    choose_address(AsyncEngineArgs(model="m", kv_transfer_config=NIXL))
    assert os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == chosen, "as the user has set it"


RECEIVE = KvTransfer("receive", b"{}")


async def test_blocks_that_are_not_read_in_time_fail_the_hand_over():
    transfers = Transfers(timeout_s=0.01)
    with pytest.raises(HandoverFailed, match="KV blocks were not read"):
        async with transfers.in_time("r", RECEIVE):
            await asyncio.Event().wait()


async def test_answer_that_has_begun_takes_as_long_as_it_takes():
    transfers = Transfers(timeout_s=0.01)
    async with transfers.in_time("r", RECEIVE):
        transfers.begun("r", 5)
        await asyncio.sleep(0.05)  # time: longer than that
    assert (transfers.take("r"), transfers.take("r")) == (5, 0)


@pytest.mark.parametrize("transfer", [None, KvTransfer("send"), KvTransfer("receive")], ids=str)
async def test_request_that_reads_nothing_may_wait(transfer):
    async with Transfers(timeout_s=0.01).in_time("r", transfer):
        await asyncio.sleep(0.05)  # time: longer than that


def test_tokens_of_requests_that_read_nothing_are_none():
    transfers = Transfers()
    transfers.begun("r", 0)
    assert transfers.take("r") == 0
