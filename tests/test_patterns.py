"""Every regular expression of the source takes time in proportion to its text, whatever the text: a peer that chooses
it must not be able to block a process.

The expressions are found in the source, and each is tried on texts made of its own parts: repeated, one after the
other, and with an end that does not match. What takes 16 times as long for 4 times the text is quadratic.
"""

import ast
import importlib
import itertools
import re
import time
from pathlib import Path
from re import _compiler, _constants, _parser

import pytest

SRC = Path(__file__).parents[1] / "src"
#: Functions of `re` with a pattern, and methods of patterns. The second look for a match at every place of the text.
WHOLE, ANYWHERE = {"match", "fullmatch"}, {"search", "sub", "subn", "findall", "finditer", "split"}
#: Patterns that functions put together, as in the source: an example of what is made.
MADE = {
    "pattern": rb'"medialane:0123456789abcdef/(\d+)"',
    "_longest_of(token.content for token in early)": r"<(?:\|im_(?:start|end)\|>|/s>|s>)",
    'rb"%b(\\d+)" % re.escape(self._request.references.prefix.encode())': rb"medialane:0123456789abcdef/(\d+)",
    "self._fragments()": rb"medialane:[0-9a-f/]*",
    'rb"(?:data:[\\w/.+-]*;base64,)?%b(\\d+)" % re.escape(self.prefix.encode())': (
        rb"(?:data:[\w/.+-]*;base64,)?medialane:0123456789abcdef/(\d+)"
    ),
    'rf"(?<![\\w-])({names})(?![\\w-])"': r"(?<![\w-])(max_size|size|max_size_bytes)(?![\w-])",
}
NUM_CHARACTERS = 500
#: Shorter times are not compared. Linear patterns need microseconds for texts of this length.
LEAST_S = 0.0005


def patterns():
    """Yield the file, the call of `re`, and the methods by which the pattern is used."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}
    nodes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {}
    for node in nodes:
        name = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", None)
        used.setdefault(name, set()).add(node.attr)
    for path, tree in trees.items():
        names = {id(value): name for name, value in assigned(tree)}
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            if (method := function_of_re(call)) is None:
                continue
            name = names.get(id(call))
            methods = used.get(name, set()) & (WHOLE | ANYWHERE) if method == "compile" else {method}
            yield pytest.param(path, call, methods, id=f"{path.relative_to(SRC)}:{call.lineno}")


def assigned(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def function_of_re(call):
    found = call.func
    is_re = isinstance(found, ast.Attribute) and isinstance(found.value, ast.Name) and found.value.id == "re"
    return found.attr if is_re and found.attr in {"compile", *WHOLE, *ANYWHERE} else None


def pattern_of(path, call):
    """The pattern of a call, compiled."""
    text = path.read_text()
    flags = [each.value for each in call.keywords if each.arg == "flags"]
    flags += call.args[1:] if call.func.attr == "compile" else []
    return re.compile(value_of(path, text, call.args[0]), value_of(path, text, flags[0]) if flags else 0)


def value_of(path, text, node):
    """The value of an expression of a module: a constant, of names of the module, or of `MADE`."""
    if isinstance(node, ast.Constant):
        return node.value
    source = ast.get_source_segment(text, node)
    if source in MADE:
        return MADE[source]
    names = {"re": re}
    if {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - {"re"}:
        module = ".".join(path.relative_to(SRC).with_suffix("").parts)
        names = vars(importlib.import_module(module))
    return eval(source, dict(names))


ONE_OF = "a0A. /-:;=_\n\t\"'{[(,?&%+@#\\<é~"


def examples(parsed):
    """Return texts that the parts of a parsed pattern match: each of its parts, what is before it, and the whole."""
    parts, whole = [], ""
    for op, value in parsed:
        texts = of_part(str(op), value)
        if str(op) != "LITERAL":
            parts += [whole, *texts]
        whole += texts[-1] if texts else ""
    return [*parts, whole]


def of_part(op, value):
    """Texts for one part, the whole of it last."""
    match op:
        case "LITERAL":
            return [chr(value)]
        case "NOT_LITERAL":
            return [each for each in ONE_OF if each != chr(value)][:1]
        case "ANY":
            return ["a"]
        case "IN":
            return characters(value)
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            texts = examples(value[2])
            return [*texts, texts[-1] * max(1, min(value[0], 100))] if texts else []
        case "SUBPATTERN":
            return examples(value[3])
        case "ATOMIC_GROUP":
            return examples(value)
        case "BRANCH":
            return [text for branch in value[1] for text in examples(branch)]
    return []  # matches no character


def characters(value):
    """Up to three characters of a class."""
    pattern = _compiler.compile(_parser.SubPattern(_parser.State(), [(_constants.IN, value)]))
    return [each for each in ONE_OF if pattern.fullmatch(each)][:3]


def adversarial(pattern):
    """Yield texts of any size: the beginning, what is repeated after it, and the end."""
    text = pattern.pattern.decode("latin-1") if isinstance(pattern.pattern, bytes) else pattern.pattern
    parts = list(dict.fromkeys(filter(None, examples(_parser.parse(text, pattern.flags)))))
    longest = max(parts, key=len, default="a")
    parts = list(dict.fromkeys([*parts[:12], longest, *parts[-6:]]))
    yield from itertools.product(["", *parts], parts, ("", "\0"))
    for one, other in itertools.permutations(parts[:8], 2):
        yield "", one + other, ""


def seconds(call, text, most=3):
    def once():
        started = time.thread_time()
        call(text)
        return time.thread_time() - started

    return min(once() for _ in range(most))


def slow_texts(pattern, methods):
    """Yield the beginnings of texts for which the time grows faster than their length."""
    calls = [pattern.match, pattern.fullmatch]
    if not methods or methods & ANYWHERE:
        calls.append(pattern.findall)
    for first, again, end in adversarial(pattern):

        def grown(factor, first=first, again=again, end=end):
            text = first + again * (NUM_CHARACTERS * factor // len(again)) + end
            return text.encode("latin-1", "replace") if isinstance(pattern.pattern, bytes) else text

        for call in calls:
            if (taken := seconds(call, long := grown(4), 1)) < LEAST_S or taken < 8 * seconds(call, short := grown(1)):
                continue
            if (taken := seconds(call, long)) >= 8 * seconds(call, short) and seconds(call, grown(16)) > 8 * taken:
                yield long[:80]


@pytest.mark.timeout(120)  # some patterns are put together by modules that import vLLM
@pytest.mark.parametrize(("path", "call", "methods"), list(patterns()))
def test_pattern_takes_time_in_proportion_to_its_text(path, call, methods):
    slow = next(slow_texts(pattern_of(path, call), methods), None)
    assert slow is None, f"the time is not in proportion to the text, for one like {slow!r}..."


@pytest.mark.parametrize("pattern", [r"(\bhttps?://[^\s?]+\?)x", r"[a-z][\w+.-]*://", r"\s+$", r"\w+@\w+"])
def test_superlinear_pattern_is_found(pattern):
    assert next(slow_texts(re.compile(pattern), {"search"}), None) is not None


def test_bounded_pattern_is_not_found():
    assert next(slow_texts(re.compile(r"(?<!\w)[a-z]{1,20}+://[^/\s]{0,100}@"), {"search"}), None) is None
