"""A gateway's view of one worker: all that its connection reports."""

from medialane.gateway.workers import RpcClient
from medialane.types.request import Endpoint, WorkerLoad


class Reported:
    """A router that notes what it learns of one worker."""

    def __init__(self, client: RpcClient) -> None:
        self.client = client
        self.loads, self.changes, self.arenas = [], [], []
        self.begun, self.ended = {}, {}
        self.num_cleared = 0
        load = WorkerLoad()
        ranks = range(max(1, client.welcome.card.data_parallel_size))
        endpoints = [Endpoint("w", "w", ready=True, load=load, num_in_flight=0, rank=rank) for rank in ranks]
        client.reports.route(self, endpoints, same_host=bool)

    def join(self, endpoint):
        return endpoint.rank

    def leave(self, slot):
        pass

    def report(self, slot, load):
        self.loads.append(load)

    def drain(self, slot, *, draining):
        pass

    def change(self, slot, change):
        self.changes.append(change)

    def announced(self, slot, work):
        number = len(self.begun)
        self.begun[number] = work
        return _Announced(self, number)

    def clear_encoder(self, slot):
        self.num_cleared += 1

    def move(self, slot, *, same_host):
        self.arenas.append(self.client.reports.arena)


class _Announced:
    """A request of another gateway."""

    def __init__(self, reported, number):
        self._reported, self._number = reported, number

    def end(self, *, is_computed):
        self._reported.ended[self._number] = is_computed
