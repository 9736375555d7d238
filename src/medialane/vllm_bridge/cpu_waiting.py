"""exp"""
import os, time
from vllm.platforms import current_platform
import vllm.distributed.utils as waiting
from vllm.distributed.device_communicators import shm_broadcast
MODE=os.environ.get("MLX_MODE","m2"); EVERY=int(os.environ.get("MLX_EVERY","32")); BUSY=float(os.environ.get("MLX_BUSY","0.01"))
def install():
    if not current_platform.is_cpu() or MODE=="m0": return
    if MODE=="m1":
        waiting.USE_SCHED_YIELD=False; return
    n=[0]
    inner=shm_broadcast.SpinCondition.wait
    def wait(self, timeout_ms=None):
        self.busy_loop_s = BUSY
        if time.monotonic() <= self.last_read + BUSY:
            n[0]+=1
            if n[0] % EVERY: os.sched_yield()
            else: time.sleep(0)
        else:
            inner(self, timeout_ms)
    shm_broadcast.SpinCondition.wait = wait
