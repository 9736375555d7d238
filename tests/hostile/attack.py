"""One row's attack on the gateway, and what must be so during and after it."""

from __future__ import annotations

from collections.abc import Sequence

from corpus import Row, World

from gateway_process import GatewayProcess

#: Far above the product's limit: a busy test machine alone takes a process off the CPU for that long.
OTHERS_S = 3.0
#: Beside these tests, two other processes start engines on two cores: what takes 1.2 s alone has taken 7.
BUSY = 3.0


def names(rows: Sequence[Row]) -> list[str]:
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    return names


def attack(row: Row, gateway: GatewayProcess, world: World) -> None:
    body = row.body(world)
    with gateway.growth() as grown, gateway.others() as slowest:
        answer = gateway.ask(body, path=row.path)
    assert (answer.status, answer.code) == (row.status, row.code), answer.body[:1000]
    assert answer.seconds < BUSY * row.seconds
    assert grown[0] < row.mib
    assert not any(
        word in answer.body
        for word in ("127.0.0.", "/tmp/", "PIL", "aiohttp", "Traceback", "too large to convert", "0x7f")
    ), answer.body[:1000]
    assert slowest[0] < OTHERS_S, "other requests had to wait"
