import os

import pytest

from medialane.cluster import Engines, Hardware, find_gpus, parse_gpu_list, place_engines, usable_cores
from medialane.types.errors import StartupFailed

CPU = Hardware((), 8)
FOUR_GPUS = Hardware(("0", "1", "2", "3"), 8)


def place(hardware, vllm_args=(), *, num_workers=2, num_encoders=0, share=0.0, single_gpu=False, environ=None):
    engines = Engines(num_workers, num_encoders, share)
    return place_engines(hardware, vllm_args, engines, single_gpu=single_gpu, environ=environ or {})


def test_multiple_workers_share_the_cores_minus_one():
    assert [dict(p.environ) for p in place(CPU, num_workers=3)] == [unbound(2)] * 3
    assert place(Hardware((), 2), num_workers=4)[3].environ == unbound(1)


def unbound(num_threads):
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(num_threads)}


def test_single_worker_uses_vllms_choice_of_cores():
    assert place(CPU, num_workers=1)[0].environ == {}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_thread_count_set_by_the_user_is_kept(num_workers):
    placed = place(CPU, num_workers=num_workers, environ={"OMP_NUM_THREADS": "7"})[0]
    assert placed.environ == {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # else vLLM would overrule it


@pytest.mark.parametrize("num_workers", [1, 2])
def test_cores_set_by_the_user_are_kept(num_workers):
    assert place(CPU, num_workers=num_workers, environ={"VLLM_CPU_OMP_THREADS_BIND": "0-3"})[0].environ == {}


def test_each_worker_gets_its_own_gpus():
    found = [p.environ["CUDA_VISIBLE_DEVICES"] for p in place(FOUR_GPUS, ["-tp", "2"])]
    assert found == ["0,1", "2,3"]


def test_too_few_gpus_error_says_what_to_change():
    with pytest.raises(StartupFailed, match=r"3 workers of 2 GPU each need 6 GPUs, 4 found.*--single-gpu"):
        place(FOUR_GPUS, ["-tp", "2"], num_workers=3)


def test_single_gpu_is_shared_with_divided_memory():
    first, second = place(FOUR_GPUS, single_gpu=True)
    assert first == second
    assert first.environ == {"CUDA_VISIBLE_DEVICES": "0"}
    assert first.vllm_args == ("--gpu-memory-utilization", "0.46")
    assert place(FOUR_GPUS, ["--gpu-memory-utilization=0.5"], single_gpu=True)[0].vllm_args[1] == "0.25"


def test_single_gpu_rejects_parallel_workers_and_must_exist():
    with pytest.raises(StartupFailed, match="ask for 2 GPUs"):
        place(FOUR_GPUS, ["-tp", "2"], single_gpu=True)
    with pytest.raises(StartupFailed, match="no GPU was found"):
        place(CPU, single_gpu=True)


def gpus_and_memory(placements):
    return [(p.gpus, p.vllm_args[1] if p.vllm_args else None) for p in placements]


def test_encoders_count_as_engines_on_cores():
    assert [dict(p.environ) for p in place(CPU, num_workers=2, num_encoders=1)] == [unbound(2)] * 3
    assert dict(place(CPU, num_workers=1, num_encoders=1)[0].environ) == unbound(3)


def test_encoders_have_gpus_of_their_own_by_default():
    assert gpus_and_memory(place(FOUR_GPUS, num_workers=3, num_encoders=1)) == [(n, None) for n in "0123"]
    with pytest.raises(StartupFailed, match=r"3 workers and 2 encoders of 1 GPU each need 5 GPUs.*--encoder-gpu-share"):
        place(FOUR_GPUS, num_workers=3, num_encoders=2)


def test_encoders_with_a_share_use_the_gpus_of_workers_in_turn():
    found = place(FOUR_GPUS, ["-tp", "2", "--gpu-memory-utilization", "0.9"], num_encoders=3, share=0.2)
    assert gpus_and_memory(found) == [
        ("0,1", "0.72"),
        ("2,3", "0.72"),
        ("0,1", "0.09"),
        ("2,3", "0.18"),
        ("0,1", "0.09"),
    ]


def test_worker_without_an_encoder_on_its_gpu_keeps_all_of_its_memory():
    found = place(FOUR_GPUS, ["--gpu-memory-utilization=0.5"], num_encoders=1, share=0.2)
    assert gpus_and_memory(found) == [("0", "0.4"), ("1", None), ("0", "0.1")]


@pytest.mark.parametrize(("share", "memory"), [(0.0, ["0.3", "0.3", "0.3"]), (0.1, ["0.405", "0.405", "0.09"])])
def test_single_gpu_is_shared_with_encoders(share, memory):
    args = ["--gpu-memory-utilization=0.9"]
    found = place(FOUR_GPUS, args, num_encoders=1, share=share, single_gpu=True)
    assert gpus_and_memory(found) == [("0", part) for part in memory]


def test_share_of_a_gpu_needs_a_gpu():
    with pytest.raises(StartupFailed, match="--encoder-gpu-share: no GPU was found"):
        place(CPU, num_encoders=1, share=0.2)


def test_cuda_visible_devices_is_respected():
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-1234"}) == ("2", "GPU-1234")
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_mig_partitions_replace_their_gpus():
    whole = "GPU 0: NVIDIA H200 (UUID: GPU-a)\nGPU 1: NVIDIA H200 (UUID: GPU-b)\n"
    assert parse_gpu_list(whole) == ("0", "1")
    partitioned = "GPU 0: NVIDIA H200 (UUID: GPU-a)\n  MIG 1g.18gb     Device  0: (UUID: MIG-c-1)\n"
    assert parse_gpu_list(partitioned) == ("MIG-c-1",)


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max", CORES), (50_000, 1), (100_000 * CORES - 50_000, CORES), (100_000 * (CORES + 1), CORES)],
    ids=["none", "half a core", "less than all", "more"],
)
def test_container_cpu_quota_limits_the_cores(tmp_path, quota, cores):
    (tmp_path / "cpu.max").write_text(f"{quota} 100000")
    assert usable_cores(tmp_path) == cores
    assert usable_cores(tmp_path / "absent") == CORES
