"""Rendering: no request makes the server decode more than the limits allow, and malformed ones get a clear error."""

from __future__ import annotations

import pytest
from attack import attack, names
from corpus import Row, World
from render_rows import DERENDER_ROWS, GENERATE_ROWS, RENDER_ROWS

from gateway_process import GatewayProcess

#: The first test waits for the gateway.
pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("row", RENDER_ROWS, ids=names(RENDER_ROWS))
def test_limits_hold_where_nothing_is_decoded(row: Row, gateway: GatewayProcess, world: World):
    attack(row, gateway, world)


@pytest.mark.parametrize("row", DERENDER_ROWS, ids=names(DERENDER_ROWS))
def test_malformed_answer_is_not_derendered(row: Row, gateway: GatewayProcess, world: World):
    attack(row, gateway, world)


@pytest.mark.parametrize("row", GENERATE_ROWS, ids=names(GENERATE_ROWS))
def test_malformed_media_of_token_ids_are_refused(row: Row, gateway: GatewayProcess, world: World):
    attack(row, gateway, world)
