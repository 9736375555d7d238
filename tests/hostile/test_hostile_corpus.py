"""Each row of the corpus: the expected response within time and memory, canary not reached, gateway healthy."""

from __future__ import annotations

import itertools

import pytest
from attack import attack, names
from audio_rows import AUDIO_ROWS
from corpus import Row, World, chat, data_url, media_part, sent
from data_rows import ANNOUNCED, DATA_ROWS
from document_rows import DOCUMENT_ROWS
from image_rows import IMAGE_ROWS
from media_files import picture
from origin_rows import ORIGIN_ROWS
from url_rows import URL_ROWS
from video_rows import VIDEO_ROWS

from breaking_processor import BREAKING_WIDTH
from gateway_process import GatewayProcess
from origin import MediaHosts

#: The first test waits for the gateway.
pytestmark = pytest.mark.timeout(400)

_numbers = itertools.count(5000)


@pytest.mark.parametrize("row", URL_ROWS, ids=names(URL_ROWS))
def test_hostile_url_is_never_contacted(row: Row, gateway: GatewayProcess, world: World):
    attack(row, gateway, world)


@pytest.mark.parametrize("row", ORIGIN_ROWS, ids=names(ORIGIN_ROWS))
def test_hostile_media_host_fails_within_limits(row: Row, gateway: GatewayProcess, world: World):
    attack(row, gateway, world)


@pytest.mark.parametrize("row", DATA_ROWS, ids=names(DATA_ROWS))
def test_hostile_body_fails_within_limits(row: Row, gateway: GatewayProcess, world: World):
    attack(row, gateway, world)


@pytest.mark.parametrize("row", IMAGE_ROWS, ids=names(IMAGE_ROWS))
def test_hostile_image_fails_within_limits(row: Row, gateway: GatewayProcess, world: World):
    attack(row, gateway, world)


@pytest.mark.parametrize("row", VIDEO_ROWS, ids=names(VIDEO_ROWS))
def test_hostile_video_fails_within_limits(row: Row, gateway: GatewayProcess, world: World):
    attack(row, gateway, world)


@pytest.mark.parametrize("row", AUDIO_ROWS, ids=names(AUDIO_ROWS))
def test_hostile_audio_fails_within_limits(row: Row, gateway: GatewayProcess, world: World):
    attack(row, gateway, world)


@pytest.mark.parametrize("row", DOCUMENT_ROWS, ids=names(DOCUMENT_ROWS))
def test_hostile_document_fails_within_limits(row: Row, gateway: GatewayProcess, world: World):
    attack(row, gateway, world)


@pytest.mark.parametrize("name", ANNOUNCED)
def test_body_is_rejected_by_its_content_length(name: str, gateway: GatewayProcess):
    with gateway.growth() as grown:
        answer = gateway.announce(ANNOUNCED[name])
    assert (answer.status, answer.code) == (413, "body_too_large")
    assert answer.seconds < 3
    assert grown[0] < 64


def test_declared_size_ends_a_fetch_before_its_body(gateway: GatewayProcess, hosts: MediaHosts, world: World):
    """Row 30: and the request is not repeated."""
    asked = hosts.num_asked.get("/declared-10-gb", 0)
    answer = gateway.ask(chat(world.model, media_part(hosts.url("/declared-10-gb"))))
    assert (answer.status, answer.code) == (413, "media_too_large")
    assert hosts.num_asked["/declared-10-gb"] == asked + 1


def test_uuid_of_a_client_is_not_rebound_by_another(gateway: GatewayProcess, world: World):
    named = media_part(data_url(picture(next(_numbers)))) | {"uuid": "the first"}
    other = media_part(data_url(picture(next(_numbers)))) | {"uuid": "the first"}
    by_uuid = {"type": "image_url", "image_url": None, "uuid": "the first"}
    assert gateway.ask(chat(world.model, named)).status == 200
    answer = gateway.ask(chat(world.model, other))
    assert (answer.status, answer.code) == (409, "uuid_conflict")
    answer = gateway.ask(chat(world.model, by_uuid), key="another")
    assert (answer.status, answer.code) == (400, "unknown_media_uuid")
    assert gateway.ask(chat(world.model, other), key="another").status == 200
    for part in (named, by_uuid):
        assert gateway.ask(chat(world.model, part)).status == 200


def test_dns_rebinding_reaches_no_forbidden_address(gateway: GatewayProcess, hosts: MediaHosts, world: World):
    """Row 23: the first look-up gave the origin's address, every later one the canary's."""
    answer = gateway.ask(chat(world.model, media_part(f"http://rebinding.test:{hosts.canary_port}/")))
    assert (answer.status, answer.code) == (400, "media_url_forbidden")


#: By height of the picture (`breaking_processor`): how the decoder crashes, and the reported error.
BREAKS = {
    301: ("segmentation fault", "media_decoder_crashed"),
    302: ("kill -9", "media_decoder_crashed"),
    303: ("abort", "media_decoder_crashed"),
    304: ("exit", "media_decoder_crashed"),
    305: ("hang", "media_decoder_timeout"),
    306: ("all memory", "media_preparation_failed"),
    307: ("exception", "media_preparation_failed"),
}


@pytest.mark.parametrize("height", [pytest.param(h, id="62 " + why) for h, (why, _) in BREAKS.items()])
def test_crashing_decoder_fails_only_its_request(height: int, gateway: GatewayProcess, world: World):
    row = Row("62", sent(lambda: picture(height, (BREAKING_WIDTH, height))), 500, BREAKS[height][1], 12.0, 4600.0)
    attack(row, gateway, world)
