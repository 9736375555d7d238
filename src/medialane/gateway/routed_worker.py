"""One connected worker as the router knows it: a slot for each of its ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from medialane.gateway.worker_link.link import WorkerLink
from medialane.routing import AnnouncedReservation, Router
from medialane.types.kv_events import KvChange
from medialane.types.request import WorkerLoad, WorkerState
from medialane.types.stats import PendingWork

logger = logging.getLogger(__name__)

#: Most requests of other gateways that are counted at one worker.
_MAX_ANNOUNCED = 4096


class RoutedWorker:
    """Reports a worker to the router, until it has `left` (a `ReportListener`). `on_encoder` is called when the encoder
    whose embeddings it loads may have changed."""

    def __init__(self, router: Router, link: WorkerLink, on_encoder: Callable[[], None]) -> None:
        self._router = router
        self._link = link
        self._on_encoder = on_encoder
        self._slots: list[int] = []
        self._announced: dict[int, AnnouncedReservation] = {}
        try:
            for endpoint in link.endpoints():
                self._slots.append(router.join(endpoint))
        except BaseException:
            self.left()
            raise

    def left(self) -> None:
        """Idempotent."""
        self._on_encoder()
        slots, self._slots = self._slots, []
        for slot in slots:
            self._router.leave(slot)

    def reported(self, loads: Sequence[WorkerLoad]) -> None:
        for slot, load in zip(self._slots, loads, strict=True):
            self._router.report(slot, load)

    def state_changed(self, state: WorkerState) -> None:
        level = logging.ERROR if state == "stalled" else logging.WARNING
        what = "is ready again" if state == "ready" else f"is {state}: it gets no new requests"
        logger.log(level, "worker %s %s", self._link.name, what)
        for slot in self._slots:
            self._router.drain(slot, draining=state != "ready")

    def changed(self, change: KvChange) -> None:
        if change.rank < len(self._slots):
            self._router.change(self._slots[change.rank], change)

    def announced(self, number: int, work: PendingWork) -> None:
        reservations, slots = self._announced, self._slots
        if number not in reservations and len(reservations) < _MAX_ANNOUNCED and work.rank < len(slots):
            reservations[number] = self._router.announced(slots[work.rank], work)

    def announcement_ended(self, number: int, *, is_computed: bool) -> None:
        reservation = self._announced.pop(number, None)
        if reservation is not None:
            reservation.end(is_computed=is_computed)

    def host_changed(self) -> None:
        self._on_encoder()
        for slot in self._slots:
            self._router.move(slot, same_host=self._link.same_host)

    def encoder_cleared(self) -> None:
        self._on_encoder()
        for slot in self._slots:
            self._router.clear_encoder(slot)
