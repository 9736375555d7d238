"""A real Prometheus that scrapes our gateways every second, and what its HTTP API answers."""

import asyncio
import math
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from medialane_process import free_port, launch

#: What Grafana replaces in queries, of a dashboard that shows the last half minute.
VALUES = {
    "$__rate_interval": "30s",
    "$__range": "30s",
    "$job": ".+",
    "$model_name": ".+",
    "$instance": ".+",
    "$ttft_slo": "1.0",
    "$tpot_slo": "0.1",
}
_TIMEOUT = aiohttp.ClientTimeout(total=20)
_COMPARED = re.compile(r"\s(?:>|<|==)\s[\d.]+(?:\sand\s|$)")


class LivePrometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    async def ask(self, path: str, **params: str) -> Any:
        """What the API returns as `data`. Fails with its message if a query is wrong."""
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as session,
            session.get(f"{self.url}/api/v1/{path}", params=params) as response,
        ):
            answer = await response.json()
            assert answer["status"] == "success", f"{params}: {answer.get('error')}"
            return answer["data"]

    async def is_ready(self) -> bool:
        try:
            async with (
                aiohttp.ClientSession(timeout=_TIMEOUT) as session,
                session.get(f"{self.url}/-/ready") as response,
            ):
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def values(self, query: str) -> list[float]:
        """The numbers that a panel with this query shows; none for NaN."""
        result = (await self.ask("query", query=replaced(query)))["result"]
        found = [float(series["value"][1]) for series in result]
        return [value for value in found if not math.isnan(value)]

    async def has_scraped_since(self, time_s: float) -> bool:
        return min(await self.values("timestamp(up)"), default=0.0) > time_s + 1.0  # a scrape takes time

    async def without_data(self, queries: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """The queries that return nothing, each with its place."""
        found = await asyncio.gather(*(self.values(query) for _, query in queries))
        return [query for query, values in zip(queries, found, strict=True) if not values]


def replaced(query: str) -> str:
    """The query as Grafana would send it."""
    for variable, value in VALUES.items():
        query = query.replace(variable, value)
    return query


def compared(expr: str) -> list[str]:
    """What an alert compares with its thresholds."""
    return [part for part in _COMPARED.split(expr) if part]


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"NOT TESTED: {name}, since Debian's package prometheus is not installed (make programs)")
    return found


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, int], rules: Path) -> Iterator[LivePrometheus]:
    """Scrape the ports of `targets`, by job; not ready yet."""
    every_second = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    jobs = [{"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for job, port in targets.items()]
    config = folder / "prometheus.yml"
    config.write_text(
        yaml.safe_dump(
            {
                "global": {**every_second, "evaluation_interval": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": jobs,
            }
        )
    )
    port = free_port()
    listen, storage = f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={folder / 'data'}"
    argv = [program("prometheus"), f"--config.file={config}", storage, listen]
    process = launch(argv, environ={"PATH": "/usr/bin:/bin"}, log=folder / "prometheus.log")
    try:
        yield LivePrometheus(port)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
