import pytest

from medialane.cluster.placement import Hardware, find_gpus, parse_gpu_list, place_workers, usable_cores
from medialane.core.errors import StartupFailed

CPU = Hardware((), 8)
FOUR_GPUS = Hardware(("0", "1", "2", "3"), 8)


def place(hardware, vllm_args=(), *, num_workers=2, single_gpu=False, environ=None):
    return place_workers(hardware, vllm_args, num_workers=num_workers, single_gpu=single_gpu, environ=environ or {})


def test_several_workers_share_the_cores_and_leave_one():
    assert [dict(p.environ) for p in place(CPU, num_workers=3)] == [unbound(2)] * 3
    assert place(Hardware((), 2), num_workers=4)[3].environ == unbound(1)


def unbound(num_threads):
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(num_threads)}


def test_single_worker_has_vllms_own_choice_of_cores():
    assert place(CPU, num_workers=1)[0].environ == {}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_number_of_threads_that_the_user_set_stays(num_workers):
    placed = place(CPU, num_workers=num_workers, environ={"OMP_NUM_THREADS": "7"})[0]
    assert placed.environ == {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # else vLLM would overrule it


@pytest.mark.parametrize("num_workers", [1, 2])
def test_cores_that_the_user_chose_stay(num_workers):
    assert place(CPU, num_workers=num_workers, environ={"VLLM_CPU_OMP_THREADS_BIND": "0-3"})[0].environ == {}


def test_each_worker_gets_gpus_of_its_own():
    found = [p.environ["CUDA_VISIBLE_DEVICES"] for p in place(FOUR_GPUS, ["-tp", "2"])]
    assert found == ["0,1", "2,3"]


def test_too_few_gpus_are_refused_with_what_to_change():
    with pytest.raises(StartupFailed, match=r"3 workers of 2 GPU each need 6 GPUs, 4 found.*--single-gpu"):
        place(FOUR_GPUS, ["-tp", "2"], num_workers=3)


def test_single_gpu_is_shared_and_its_memory_divided():
    first, second = place(FOUR_GPUS, single_gpu=True)
    assert first == second
    assert first.environ == {"CUDA_VISIBLE_DEVICES": "0"}
    assert first.vllm_args == ("--gpu-memory-utilization", "0.46")
    assert place(FOUR_GPUS, ["--gpu-memory-utilization=0.5"], single_gpu=True)[0].vllm_args[1] == "0.25"


def test_single_gpu_cannot_hold_parallel_workers_nor_be_absent():
    with pytest.raises(StartupFailed, match="ask for 2 GPUs"):
        place(FOUR_GPUS, ["-tp", "2"], single_gpu=True)
    with pytest.raises(StartupFailed, match="no GPU was found"):
        place(CPU, single_gpu=True)


def test_outer_choice_of_gpus_is_honoured():
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-1234"}) == ("2", "GPU-1234")
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_partitions_stand_for_the_gpus_that_they_are_made_of():
    whole = "GPU 0: NVIDIA H200 (UUID: GPU-a)\nGPU 1: NVIDIA H200 (UUID: GPU-b)\n"
    assert parse_gpu_list(whole) == ("0", "1")
    partitioned = "GPU 0: NVIDIA H200 (UUID: GPU-a)\n  MIG 1g.18gb     Device  0: (UUID: MIG-c-1)\n"
    assert parse_gpu_list(partitioned) == ("MIG-c-1",)


@pytest.mark.parametrize(("text", "limit"), [("max 100000", None), ("50000 100000", 1), ("150000 100000", 2)])
def test_quota_of_a_container_bounds_the_cores(tmp_path, monkeypatch, text, limit):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    (tmp_path / "cpu.max").write_text(text)
    assert usable_cores(tmp_path) == (limit or 4)
    assert usable_cores(tmp_path / "absent") == 4
