"""Plain vLLM's API server with its engine forked from it: `python plain_vllm_program.py FLAGS`.

On a CPU vLLM spawns the engine, which then takes ten seconds of CPU time to import vLLM once more. Apart from that the
server is as its own command starts it.
"""

import multiprocessing

from vllm.entrypoints.launchers.api_server.entry import main
from vllm.v1.engine import utils

if __name__ == "__main__":
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    main()
