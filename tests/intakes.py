"""What receives the requests of a gateway, in front of an app of a test."""

from medialane.gateway import GatewayConfig, IntakeMiddleware
from medialane.media import MediaConfig
from medialane.runtime.tasks import LoopFairness


class Intake:
    """`IntakeMiddleware` with what it shares with other parts of a gateway. The owner calls `close`."""

    def __init__(self, app, config=None, media=None, **settings):
        self.fairness = LoopFairness()
        self._middleware = IntakeMiddleware(
            app, media or MediaConfig(), config or GatewayConfig(), self.fairness, **settings
        )

    async def __call__(self, scope, receive, send):
        await self._middleware(scope, receive, send)

    def close(self):
        self.fairness.close()
