"""Plain vLLM's API server with its engine forked from it: `python plain_vllm_program.py FLAGS`.

On a CPU vLLM spawns the engine, which then takes ten seconds of CPU time to import vLLM once more. Apart from that the
server is as its own command starts it.
"""

import multiprocessing

from vllm.entrypoints.launchers.api_server.entry import main
from vllm.platforms import current_platform
from vllm.v1.engine import utils

if __name__ == "__main__":
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    # A spawned engine replaces kernels before it imports the model. vLLM's search for them fails in a process that has
    # llvmlite's modules, as this one will have by the time it forks, if the model's processor uses numba.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
    main()
