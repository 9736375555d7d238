"""A gateway's view of one worker: all that its connection reports."""

from medialane.gateway.workers import RpcClient


class Reported:
    """Notes what a `RoutedWorker` is told."""

    def __init__(self, client: RpcClient) -> None:
        self.client = client
        self.loads, self.changes, self.arenas = [], [], []
        self.begun, self.ended = {}, {}
        self.num_cleared = 0
        self.has_left = False
        client.reports.watch(self)

    def reported(self, loads):
        self.loads.append(loads)

    def state_changed(self, state):
        pass

    def changed(self, change):
        self.changes.append(change)

    def announced(self, number, work):
        self.begun[number] = work

    def announcement_ended(self, number, *, is_computed):
        self.ended[number] = is_computed

    def encoder_cleared(self):
        self.num_cleared += 1

    def host_changed(self):
        self.arenas.append(self.client.reports.arena)

    def left(self):
        self.has_left = True
