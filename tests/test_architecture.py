"""The import table of DESIGN.md, and the owners of heavy dependencies."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "medialane"

ROOMS = {
    "core", "media", "prepare", "arena", "transfer", "routing", "rpc", "vllm_bridge", "gateway", "worker", "cluster",
    "observability", "cli", "config",
}  # fmt: skip

MAY_IMPORT = {
    "core": set(),
    "observability": {"core"},
    "media": {"core", "observability"},
    "arena": {"core", "observability"},
    "routing": {"core", "observability"},
    "rpc": {"core", "observability"},
    "transfer": {"core", "observability", "arena"},
    "prepare": {"core", "observability", "media", "arena"},
    # vllm_bridge fills protocols that other rooms define; it may name those, and nothing else of theirs. The exception
    # is the arena: EngineCore runs our plugin, and maps the arena itself.
    "vllm_bridge": {"core", "observability", "arena"},
    "gateway": ROOMS - {"worker", "vllm_bridge", "cluster", "cli", "config"},
    "worker": {"transfer", "rpc", "core", "observability"},
    "cluster": ROOMS - {"cli"},
    "cli": ROOMS,
    "config": ROOMS - {"cli"},
}

#: Files that define protocols for vllm_bridge to fill.
PROTOCOLS = {
    "medialane.gateway.story",
    "medialane.media.sampling",
    "medialane.prepare.processor",
    "medialane.worker.engine",
}

#: Heavy dependency -> where it may be imported.
OWNERS = {
    "vllm": "vllm_bridge/",
    "torch": "vllm_bridge/",
    "transformers": "vllm_bridge/",
    "tokenizers": "vllm_bridge/",
    "nixl": "transfer/nixl.py",
    "ray": "cluster/ray.py",
    # Machine code for the scan of bodies and the choice of a worker; half a second to import: gateways alone load it.
    "numba": ("core/compiled.py", "gateway/intake/native_json.py", "routing/native_view.py"),
    "llvmlite": "routing/native_view.py",
    "av": ("media/video.py", "media/audio.py", "media/kinds.py"),
}

FILES = sorted(SRC.rglob("*.py"))


def imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names if node.module.startswith("medialane")]
    return names


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "medialane" and len(parts) > 1 else None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_file_imports_only_the_rooms_that_its_room_may(path):
    room = path.relative_to(SRC).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    for module in imports(path):
        other = room_of(module)
        if other not in ROOMS or other == room:
            continue
        if room == "vllm_bridge" and any(module == p or module.startswith(p + ".") for p in PROTOCOLS):
            continue
        assert other in MAY_IMPORT[room], f"{room} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_heavy_dependency_has_one_owner(path):
    place = str(path.relative_to(SRC))
    for module in imports(path):
        owner = OWNERS.get(module.split(".")[0])
        assert owner is None or place.startswith(owner), f"{place} imports {module}"


def test_every_folder_is_a_room():
    folders = {p.name for p in SRC.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders | {"config"} == ROOMS
