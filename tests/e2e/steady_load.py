"""Clients that ask without a pause, as long as processes are restarted under them."""

import asyncio
import json

import aiohttp
from openai_http import chat, picture, text

#: At 50 ms a token, answers take a second; the long ones take longer than a drain.
SHORT, LONG = 20, 160


class SteadyLoad:
    """Clients that ask one question after the other, on connections that are kept alive."""

    def __init__(self, client):
        self._client = client
        self.is_over = False
        self.answers, self.failures = {}, []
        self._tasks = []

    def start(self, *, short, long=0):
        self._tasks = [asyncio.create_task(self._ask(n, SHORT)) for n in range(short)]
        self._tasks += [asyncio.create_task(self._ask(n, LONG)) for n in range(short, short + long)]

    async def stop(self):
        self.is_over = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, number, max_tokens):
        content = (text(f"Question {number}"), *((picture(number),) if number % 2 else ()))
        body = chat(*content, max_tokens=max_tokens, stream=True, ignore_eos=True)
        async with self._client.session() as session:
            while not self.is_over:
                self.answers.setdefault(number, []).append(await self._answer(session, body))

    async def _answer(self, session, body):
        ids, finish = [], None
        try:
            body = {**body, "model": self._client.model}
            async with session.post(f"{self._client.base_url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    self.failures.append(await response.text())
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            self.failures.append(event)
                        for choice in event.get("choices", ()):
                            ids += choice.get("token_ids") or ()
                            finish = choice["finish_reason"] or finish
        except aiohttp.ClientError as error:
            self.failures.append(repr(error))
        return (*ids, finish)

    def check(self):
        assert not self.failures, self.failures
        for answers in self.answers.values():
            assert set(answers) == {answers[0]}
            assert len(answers[0]) > SHORT
