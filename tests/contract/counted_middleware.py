"""A user's middleware, as `--middleware` names it: counts its instances and requests."""


class CountedMiddleware:
    num_made = 0
    num_passed = 0

    def __init__(self, app):
        self._app = app
        type(self).num_made += 1

    async def __call__(self, scope, receive, send):
        type(self).num_passed += 1
        await self._app(scope, receive, send)
