"""Which room may import which, the owners of heavy dependencies, and of vLLM's private names."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from medialane.vllm_bridge.seams.table import GROUPS

SRC = Path(__file__).parents[1] / "src" / "medialane"

ROOMS = {
    "types", "runtime", "media", "prepare", "arena", "wire", "transfer", "store", "routing", "vllm_bridge", "gateway",
    "worker", "cluster", "observability", "testing", "tools", "cli", "client", "config",
}  # fmt: skip

BASE = {"types", "runtime", "observability"}

MAY_IMPORT = {
    "types": set(),
    "runtime": {"types"},
    "observability": {"types", "runtime"},
    "media": BASE,
    "arena": BASE,
    "routing": BASE,
    "wire": BASE,
    "transfer": BASE | {"arena", "wire"},
    "prepare": BASE | {"media", "arena", "wire"},
    # vllm_bridge implements protocols of other packages; it may import those and nothing else. The exception
    # is the arena: EngineCore runs our plugin, and maps the arena itself.
    "vllm_bridge": BASE | {"arena"},
    "store": BASE | {"media", "arena", "prepare", "transfer", "wire"},
    "gateway": BASE | {"media", "arena", "prepare", "transfer", "store", "wire", "routing"},
    "worker": BASE | {"arena", "wire"},
    "testing": BASE | {"prepare", "transfer", "wire", "worker", "gateway"},
    "cluster": BASE | {"config", "gateway", "vllm_bridge", "wire", "worker"},
    # Programs beside the server. check's tensor_program, in a process of its own, makes features as a preparer does;
    # compare reads what a gateway records.
    "tools": BASE | {"cluster", "gateway", "testing", "media", "vllm_bridge"},
    # A library for programs of others, not a part of medialane's processes.
    "client": BASE | {"arena", "store", "wire"},
    "cli": ROOMS - {"cli", "client"},
    # The settings of each room, and of the simulated engine.
    "config": ROOMS - {"config", "cli", "client", "cluster", "tools", "transfer", "vllm_bridge"},
}

#: What of `testing` commands use: the simulated engine (--engine simulated), the tiny model and the media of `demo` and
#: `check`. The fakes are for tests and benchmarks.
IN_COMMANDS = ("simulated", "tiny_model", "sample_media")

#: Which of its rooms each room of vllm_bridge may import.
BRIDGE_ROOMS = {
    "seams": set(),
    "items": {"seams"},
    "learned": {"seams", "items"},
    "engine": {"seams", "items", "learned"},
    "frontend": {"seams", "items", "learned", "engine"},
}

#: Files that define protocols for vllm_bridge to fill.
PROTOCOLS = {
    "medialane.prepare.processor",
    "medialane.worker.engine",
}

#: Heavy dependency -> where it may be imported; () is nowhere yet.
OWNERS = {
    "vllm": ("vllm_bridge/",),
    "torch": ("vllm_bridge/", "testing/tiny_model.py", "client/tensors.py"),
    "transformers": ("vllm_bridge/", "testing/tiny_model.py"),
    "tokenizers": ("vllm_bridge/", "testing/tiny_model.py"),
    "nixl": ("transfer/nixl/nixl_agent.py", "vllm_bridge/seams/kv_transfer.py"),
    "ray": ("cluster/ray/ray_cluster.py",),
    # Machine code for the scan of bodies; half a second to import: only gateways load it.
    "numba": ("gateway/intake/native_json.py", "vllm_bridge/learned/processor_factory.py"),
    # File locks, which show whether an owner is alive, and whether a range is being written; numbers of descriptors.
    "fcntl": ("runtime/private_files.py", "runtime/heartbeat.py", "arena/locks.py"),
    "cryptography": ("wire/certificate_authority.py",),
    "av": (
        "media/video.py",
        "media/video_capture.py",
        "media/audio.py",
        "media/decoders.py",
        "testing/sample_media.py",
    ),
}

FILES = sorted(SRC.rglob("*.py"))


@cache
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
def test_file_imports_only_the_packages_allowed_for_its_package(path):
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
def test_fakes_are_imported_only_by_tests(path):
    if path.is_relative_to(SRC / "testing"):
        return
    used = {module.split(".")[2] for module in imports(path) if module.startswith("medialane.testing.")}
    assert used <= set(IN_COMMANDS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_heavy_dependency_has_one_owner(path):
    place = str(path.relative_to(SRC))
    for module in imports(path):
        owner = OWNERS.get(module.split(".")[0])
        assert owner is None or place.startswith(owner), f"{place} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_rooms_of_the_bridge_import_only_those_before_them(path):
    first, *rest = path.relative_to(SRC).parts
    if first != "vllm_bridge" or len(rest) < 2:
        return
    for module in imports(path):
        parts = module.split(".")
        if parts[:2] == ["medialane", "vllm_bridge"] and len(parts) > 2 and parts[2] in BRIDGE_ROOMS.keys() - {rest[0]}:
            assert parts[2] in BRIDGE_ROOMS[rest[0]], f"vllm_bridge/{rest[0]} imports {module}"


def test_every_folder_is_a_known_package():
    folders = {p.name for p in SRC.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == ROOMS


def test_modules_named_in_the_tables_exist():
    """A stale entry would grant its permissions to a later file of that name."""
    protocols = {module.replace(".", "/").removeprefix("medialane/") + ".py" for module in PROTOCOLS}
    owners = {owner for places in OWNERS.values() for owner in places}
    assert not [place for place in protocols | owners if not (SRC / place).exists()]
    assert MAY_IMPORT.keys() == ROOMS
    assert set().union(*MAY_IMPORT.values()) <= ROOMS


BRIDGE = SRC / "vllm_bridge"

#: What `vllm_bridge` may import of vLLM anywhere: what vLLM documents for those who embed it, write plugins, loaders or
#: models, with the types in its signatures. Everything else goes through `vllm_bridge.seams` and is in its table.
PUBLIC = {
    "vllm": {"config", "envs"},
    "vllm.config": {"KVEventsConfig", "KVTransferConfig", "ModelConfig", "VllmConfig"},
    "vllm.engine.arg_utils": {"AsyncEngineArgs"},
    "vllm.engine.protocol": {"EngineClient"},
    "vllm.exceptions": {
        "GenerationError", "GracefulHTTPError", "LoRAAdapterNotFoundError", "MaxQueuedTokensError",
        "QueueOverflowError", "VLLMClientError", "VLLMError", "VLLMServerError", "VLLMUnprocessableEntityError",
        "VLLMValidationError",
    },
    "vllm.inputs": {
        "build_enc_dec_input", "mm_enc_dec_input", "mm_input", "split_enc_dec_input", "tokens_input",
    },
    "vllm.logprobs": {"Logprob"},
    "vllm.lora.request": {"LoRARequest"},
    "vllm.lora.utils": {"get_adapter_absolute_path"},
    "vllm.multimodal": {"MULTIMODAL_REGISTRY"},
    "vllm.multimodal.inputs": {
        "BaseMultiModalField", "MultiModalBatchedField", "MultiModalFieldElem", "MultiModalFlatField",
        "MultiModalKwargsItem", "MultiModalKwargsItems", "MultiModalSharedField", "PlaceholderRange",
    },
    "vllm.multimodal.media": {"MEDIA_CONNECTOR_REGISTRY", "ImageMediaIO", "MediaConnector", "VideoMediaIO"},
    "vllm.multimodal.media.audio": {"AudioMediaIO"},
    "vllm.multimodal.media.image": {"ImageMediaIO"},
    "vllm.multimodal.media.video": {"VideoMediaIO"},
    "vllm.multimodal.parse": {"MultiModalDataItems"},
    "vllm.multimodal.processing.processor": {"BaseMultiModalProcessor", "PromptUpdateDetails"},
    "vllm.outputs": {"CompletionOutput", "PoolingOutput", "PoolingRequestOutput", "RequestOutput"},
    "vllm.platforms": {"current_platform"},
    "vllm.pooling_params": {"PoolingParams"},
    "vllm.reasoning": {"ReasoningParserManager"},
    "vllm.renderers": {"BaseRenderer", "renderer_from_config"},
    "vllm.renderers.inputs.preprocess": {"parse_model_prompt"},
    "vllm.sampling_params": {"RequestOutputKind", "SamplingParams"},
    "vllm.tool_parsers": {"ToolParserManager"},
    "vllm.usage.usage_lib": {"UsageContext"},
    "vllm.v1.engine.async_llm": {"AsyncLLM"},
    "vllm.v1.engine.exceptions": {"EngineDeadError"},
    "vllm.v1.metrics.loggers": {"StatLoggerBase"},
    "vllm.version": {"__version__"},
}  # fmt: skip

_SEAMS = [seam for group in GROUPS for seam in group.seams]
_NAMES = {seam.where.rpartition(":")[2].rpartition(".")[2] for seam in _SEAMS} | {seam.lookup for seam in _SEAMS}
_ATTRIBUTES = {name for seam in _SEAMS for name in seam.attributes}

#: Names of vLLM that may occur only in the files of `seams`: as an attribute, a method or a string. Those with an
#: underscore, and the members of a front end, whatever they are called; only `self` may have one of the same name.
PRIVATE = {name for name in _NAMES | _ATTRIBUTES if name.startswith("_")} | {
    name
    for group in GROUPS
    if group.name == "engine front end"
    for seam in group.seams
    for name in (*seam.attributes, seam.where.rpartition(".")[2])
    if "v1" not in name
}


def vllm_imports(path: Path) -> set[tuple[str, str]]:
    """(module, name) of everything that a file imports of vLLM; (module, "") for a module itself. In the seams, what
    is imported if an import fails is the same name where a later vLLM has it."""
    tree = ast.parse(path.read_text())
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and path in ADAPTERS]
    later = {id(node) for handler in handlers for node in ast.walk(handler)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in later:
            continue
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module, alias.name) for alias in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] == "vllm"}


def is_public(module: str, name: str) -> bool:
    return (module, name) == ("vllm", "") or name in PUBLIC.get(module, ())


def private_uses(tree: ast.AST) -> list[str]:
    """Accesses of `something._name` where something is not self or cls, and private names of vLLM's."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            is_hidden = node.attr.startswith("_") and not node.attr.startswith("__")
            if not is_own and (is_hidden or node.attr in PRIVATE):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += [node.name] if node.name in PRIVATE and node.name.startswith("_") else []
        elif isinstance(node, ast.Constant) and node.value in PRIVATE:
            found.append(repr(node.value))
    return found


def patched(tree: ast.AST) -> list[str]:
    """Attributes of what was imported from vLLM that are assigned to."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "vllm"
        for alias in node.names
    }
    targets = [t for node in ast.walk(tree) if isinstance(node, ast.Assign) for t in node.targets]
    return [ast.unparse(t) for t in targets if isinstance(t, ast.Attribute) and _root(t) in imported]


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


OUTSIDE = sorted(path for path in BRIDGE.rglob("*.py") if path.parent.name != "seams")
ADAPTERS = sorted((BRIDGE / "seams").glob("*.py"))


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda p: str(p.relative_to(BRIDGE)))
def test_private_vllm_names_are_used_only_in_the_seams(path):
    tree = ast.parse(path.read_text())
    assert {found for found in vllm_imports(path) if not is_public(*found)} == set()
    assert private_uses(tree) == []
    assert patched(tree) == []


@pytest.mark.parametrize(
    "source",
    [
        "renderer._process_multimodal_async = 1",
        "self.processor._find_mm_placeholders(1)",
        "class A:\n    def _decode_mm_item(self): ...",
        "setattr(x, '_init_executor', 1)",
        "llm.engine_core.encoder",
        "self._llm.output_processor",
    ],
)
def test_use_of_a_private_name_is_detected(source):
    assert private_uses(ast.parse(source))


def test_patched_import_is_detected():
    assert patched(ast.parse("from vllm.v1.engine import core\ncore.EngineCore.step = 1")) == ["core.EngineCore.step"]


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda p: p.name)
def test_seam_table_lists_every_vllm_name_that_the_seams_use(path):
    places = {seam.where.partition(":")[::2] for seam in _SEAMS}
    listed = {(module, name.partition(".")[0]) for module, name in places}
    listed |= {(seam.where, name) for seam in _SEAMS for name in seam.attributes}
    modules = {module for module, _ in places}
    unlisted = {
        (module, name)
        for module, name in vllm_imports(path)
        if not is_public(module, name) and (module, name) not in listed and f"{module}.{name}" not in modules
    }
    assert unlisted == set()
    touched = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    }
    assert touched <= PRIVATE


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_seam_table_names_modules_and_tests(group):
    assert (BRIDGE / f"{group.module.replace('.', '/')}.py").is_file()
    assert all((SRC.parents[1] / test).is_file() for test in group.tests)


TESTS = Path(__file__).parent
TEST_FILES = sorted(TESTS.rglob("*.py"))

#: Also in the text of scripts. `asyncio.sleep(0)` waits for no time: it yields to the event loop once.
SLEEP = re.compile(r"\b(?:time|asyncio)\.sleep\((?!0\))")
REASON = re.compile(r"# (?:noqa: [A-Z0-9]+ - )?time: \w")


def unexplained_sleeps(source: str) -> list[str]:
    return [line for line in source.splitlines() if SLEEP.search(line) and not REASON.search(line)]


def imported_sleeps(source: str) -> list[str]:
    """Imports that would hide a sleep from `unexplained_sleeps`."""
    hidden = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "asyncio"):
            hidden += [ast.unparse(node) for alias in node.names if alias.name == "sleep"]
        elif isinstance(node, ast.Import):
            hidden += [ast.unparse(node) for alias in node.names if alias.name in ("time", "asyncio") and alias.asname]
    return hidden


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda p: str(p.relative_to(TESTS)))
def test_sleep_in_tests_says_why_time_is_its_subject(path):
    """Others wait for an event, or for a condition (waiting.py)."""
    if path == Path(__file__):
        return
    source = path.read_text()
    assert unexplained_sleeps(source) + imported_sleeps(source) == []


@pytest.mark.parametrize(
    "source",
    ["time.sleep(1)", "await asyncio.sleep(delay_s)  # a bit", "SCRIPT = 'time.sleep(60)'", "time.sleep(1)  # time:"],
)
def test_sleep_without_a_reason_is_detected(source):
    assert unexplained_sleeps(source)


@pytest.mark.parametrize("source", ["from time import sleep", "from asyncio import sleep as wait", "import time as t"])
def test_sleep_under_another_name_is_detected(source):
    assert imported_sleeps(source)


@pytest.mark.parametrize("source", ["await asyncio.sleep(0)", "time.sleep(1)  # time: longer than the timeout"])
def test_sleep_with_a_reason_is_accepted(source):
    assert unexplained_sleeps(source) == imported_sleeps(source) == []
