import numpy as np
import pytest
from routing_parts import SEQUENCES, SlotTable, bit_rows

from medialane.routing import RoutingConfig, RoutingRequest
from medialane.types.request import Endpoint, ModelCard, WorkerLoad


def card(**kwargs):
    return ModelCard(**{"model": "m", "max_model_len": 4096, "block_size": 16, "processor": {}} | kwargs)


def endpoint(name="w", *, rank=0, load=None, **kwargs):
    return Endpoint(name, f"unix:/{name}", True, load or WorkerLoad(), 0, rank=rank, **kwargs)


def table(**kwargs):
    return SlotTable(RoutingConfig(**kwargs))


def anyone(slots, **kwargs):
    return slots.candidates(RoutingRequest({16: np.empty(0, np.uint64)}, 10, **kwargs))


def test_slot_numbers_are_reused():
    slots = table()
    first, second = slots.join(endpoint("a")), slots.join(endpoint("b"))
    slots.leave(first)
    assert anyone(slots) == 1 << second.number
    assert slots.join(endpoint("c")).number == first.number
    assert not slots.is_current(first)


def test_arrays_grow_and_keep_their_contents():
    slots = table()
    for number in range(100):
        slots.join(endpoint(f"w{number}", load=WorkerLoad(num_running=number)))
    assert slots.table[SEQUENCES][:100].tolist() == list(range(100))
    assert anyone(slots) == (1 << 100) - 1


def test_each_rank_of_a_worker_has_its_own_slot():
    slots = table()
    slots.join(endpoint("a", rank=0))
    second = slots.join(endpoint("a", rank=1))
    assert anyone(slots, rank=1) == 0b10
    assert anyone(slots, rank=2) == 0
    assert slots.at(("a", 1)) is second
    with pytest.raises(ValueError, match="rank 1 of worker a"):
        slots.join(endpoint("a", rank=1))


def test_draining_or_unready_worker_gets_no_requests():
    slots = table()
    slots.join(endpoint("a", draining=True))
    slots.join(Endpoint("b", "unix:/b", ready=False, load=WorkerLoad(), num_in_flight=0))
    slots.join(endpoint("c"))
    assert anyone(slots) == 0b100


def test_full_worker_gets_no_requests_until_one_ends():
    slots = table(max_in_flight=2)
    slot = slots.join(endpoint())
    for _ in range(2):
        slots.queue(slot, 5.0)
    assert anyone(slots) == 0
    slot.num_in_flight -= 1
    slots.update(slot)
    assert anyone(slots) == 1


def test_adapter_must_be_served():
    slots = table()
    slots.join(endpoint("a", card=card(max_loras=0)))
    slots.join(endpoint("b", card=card(max_loras=2)))
    slots.join(endpoint("c"))  # tells nothing: taken at its word that it was started for this gateway
    assert anyone(slots) == 0b111
    assert anyone(slots, lora="x") == 0b110


def test_queue_is_the_work_sent_but_not_yet_prefilled():
    slots = table()
    slot = slots.join(endpoint())
    slots.queue(slot, 30.0)
    slots.queue(slot, 12.5)
    assert slots.queue_ms(slot) == pytest.approx(42.5)
    slots.unqueue(slot, 30.0)
    assert slots.queue_ms(slot) == pytest.approx(12.5)
    slots.unqueue(slot, 12.5)
    assert slots.queue_ms(slot) == 0


def test_requests_of_other_gateways_count_with_our_mean():
    slots = table(request_ms=10.0)
    mine, theirs = slots.join(endpoint("a")), slots.join(endpoint("b", load=WorkerLoad(num_waiting=3)))
    slots.queue(mine, 10.0)
    assert slots.queue_ms(theirs) == pytest.approx(30.0)


def test_own_requests_in_the_report_do_not_count_twice():
    slots = table()
    slot = slots.join(endpoint())
    slots.queue(slot, 10.0)
    slots.queue(slot, 10.0)
    slot.load = WorkerLoad(num_running=1, num_waiting=1)
    slots.update(slot)
    assert slots.queue_ms(slot) == pytest.approx(20.0)
    assert slot.num_sequences == 2


def test_announced_requests_in_the_report_do_not_count_twice_while_other_gateways_sequences_run():
    slots = table(request_ms=10.0)
    slot = slots.join(endpoint())
    slots.queue(slot, 10.0)
    slots.queue(slot, 10.0, announced=True)
    slot.load = WorkerLoad(num_running=40, num_waiting=2)
    slots.update(slot)
    assert slots.queue_ms(slot) == pytest.approx(20.0)
    slot.load = WorkerLoad(num_running=40, num_waiting=5)  # three that were not announced
    slots.update(slot)
    assert slots.queue_ms(slot) == pytest.approx(50.0)


def test_wait_of_a_worker_is_what_the_last_request_has_waited_while_others_wait():
    slots = table()
    for rank, wait_s in enumerate((0.5, 2.0)):
        slots.join(endpoint("a", rank=rank, load=WorkerLoad(num_waiting=1))).wait_s = wait_s
    slots.join(endpoint("b")).wait_s = 3.0
    assert slots.waits_s() == {"a": 2.0, "b": 0.0}


def test_engine_has_room_while_nothing_waits_there_and_less_than_two_steps_are_to_be_prefilled():
    slots = table(prefill_ms_per_token=1.0)
    slot = slots.join(endpoint(card=card(max_num_seqs=4, max_num_batched_tokens=100)))
    assert slots.with_room == 1
    slots.queue(slot, 150.0)
    assert slots.with_room == 1
    slots.queue(slot, 60.0)
    assert slots.with_room == 0, "this step and the next are full"
    slots.unqueue(slot, 150.0)
    assert slots.with_room == 1
    slot.load = WorkerLoad(num_running=1, num_waiting=1)
    slots.update(slot)
    assert slots.with_room == 0, "one waits there"
    slot.load = WorkerLoad(num_running=2)
    slots.update(slot)
    assert slots.with_room == 1
    slot.load = WorkerLoad(num_running=4)
    slots.update(slot)
    assert slots.with_room == 0, "as many run as may"
    slot.load, slot.draining = WorkerLoad(), True
    slots.update(slot)
    assert slots.with_room == 0


def test_engine_with_one_long_prompt_has_room_for_the_next():
    slots = table(prefill_ms_per_token=1.0)
    slot = slots.join(endpoint(card=card(max_num_batched_tokens=100)))
    slots.queue(slot, 900.0)
    assert slots.with_room == 1, "else it would have nothing to do until the next one comes"
    slots.queue(slot, 10.0)
    assert slots.with_room == 0


def test_sequence_above_max_num_seqs_waits():
    slots = table(running_ms=1.0, over_capacity_ms=100.0)
    slot = slots.join(endpoint(load=WorkerLoad(num_running=4), card=card(max_num_seqs=4)))
    assert slots.running_ms(slot) == pytest.approx(104.0)
    slot.load = WorkerLoad(num_running=3)
    assert slots.running_ms(slot) == pytest.approx(3.0)


def test_kv_pressure_rises_from_its_threshold_to_one():
    slots = table(kv_pressure_ms=200.0, kv_pressure_threshold=0.8)
    assert [slots.kv_pressure_ms(WorkerLoad(kv_usage=usage)) for usage in (0.5, 0.8, 0.9, 1.0)] == pytest.approx(
        [0, 0, 100, 200]
    )


def test_bit_masks_become_rows():
    rows = bit_rows([0b101, 1 << 63, 0], 64)
    assert rows.shape == (3, 64)
    assert [row.nonzero()[0].tolist() for row in rows] == [[0, 2], [63], []]
    assert rows.max() == 1


def test_remote_slots_are_those_of_other_hosts():
    slots = table()
    near, far = slots.join(endpoint("a", same_host=True)), slots.join(endpoint("b", same_host=False))
    assert slots.remote == 1 << far.number
    slots.move(far, same_host=True)
    slots.move(near, same_host=False)
    assert slots.remote == 1 << near.number
