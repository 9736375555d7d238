"""A worker process with a fake handler: `python rpc_worker.py ADDRESS NUM_TOKENS DELAY_S`. Prints its address."""

import asyncio
import sys

import uvloop

from medialane.testing.fake_worker import FakeHandler
from medialane.wire import RpcConfig
from medialane.worker import RpcServer


async def main(address: str, num_tokens: str, delay_s: str) -> None:
    config = RpcConfig(
        heartbeat_interval_s=0.05, heartbeat_timeout_s=1.0, tcp_heartbeat_timeout_s=1.0, release_timeout_s=1.0
    )
    server = RpcServer(FakeHandler(range(int(num_tokens)), delay_s=float(delay_s)), config)
    sys.stdout.write(await server.serve(address) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
