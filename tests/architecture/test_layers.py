"""Imports go downwards only and in no circle, and each layer knows only the third parties of its business."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from arch_source import LAB, PACKAGE, calls, imported_modules, imports, layer_of, modules, nowhere

OWN = {
    "errors": "",
    "util": "errors",
    "release": "",
    "ports": "errors core.api",
    "identity": "errors core.api",
    "hashing": "ports",
    "priority": "",
    "config": "errors",
    "core": "config errors",
    "tensors": "core.api hashing config errors",
    "tasks": "tensors config errors",
    "learner": "tasks tensors ports priority core.api config errors",
    "adapters": "ports priority identity hashing core.api config errors",
    "lab.simulation": "core config errors",
    "credits": "adapters.data_dir core identity errors",
    "web": "adapters.data_dir adapters.run_store core config daemon errors ports",
    "daemon": "web adapters credits learner tasks tensors core ports priority identity hashing config errors",
    "demo": "daemon adapters learner tasks tensors core identity config errors",
    "lab": "demo lab.simulation daemon adapters learner tasks tensors core ports hashing identity config "
    "errors",
}
"""Layer -> what it may import of both packages, beside itself and the numbers of the release; `lab` is
`p2pdiloco_lab`, which the product never imports. `cli`, `lab.cli`, `session`, `session_daemon` and `__main__`
compose everything. `core.api` is data, not behaviour; the daemon knows the learner's channel, never its
loop's inside."""

THIRD_PARTY = {
    "": "",
    "errors": "msgspec",
    "util": "msgspec",
    "release": "",
    "ports": "msgspec",
    "hashing": "blake3",
    "priority": "",
    "identity": "base58 cryptography msgspec",
    "config": "msgspec",
    "core": "msgspec",
    "lab.simulation": "msgspec",
    "demo": "matplotlib msgspec psutil rich",
    "lab": "matplotlib msgspec numpy psutil rich torch uvloop",
    "lab.cli": "click msgspec",
    "tensors": "msgspec numpy torch",
    "tasks": "PIL accelerate datasets gguf huggingface_hub msgspec numpy pyarrow safetensors sklearn "
    "tokenizers torch transformers",
    "learner": "msgspec numpy safetensors torch",
    "adapters": "base58 cryptography dns google hivemind msgspec numpy psutil safetensors uvloop zeroconf",
    "credits": "msgspec",
    "daemon": "miniupnpc msgspec numpy psutil rich torch uvloop",
    "web": "jinja2 msgspec prometheus_client segno starlette uvicorn",
    "cli": "click libp2p matplotlib msgspec multiaddr psutil rich segno tensorboard trackio trio uvloop "
    "wandb",
    "session": "msgspec torch",
    "session_daemon": "psutil",
    "__main__": "",
}

PURE_STDLIB = {
    "__future__", "abc", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools", "hashlib",
    "heapq", "itertools", "math", "operator", "random", "re", "statistics", "string", "struct",
    "traceback", "types", "typing",
}  # fmt: skip
"""What core and the simulator may use of the standard library: nothing that knows time, files, sockets,
processes, loggers or event loops. `random` only as `random.Random`, seeded and passed in."""


def _within(name: str, allowed: set[str]) -> bool:
    return any(name == a or name.startswith(a + ".") for a in allowed)


def _known(layer: str, name: str) -> bool:
    return layer not in OWN or _within(name, {*OWN[layer].split(), layer, "release", "util"})


def imported_from_above(module: str) -> Iterator[str]:
    layer = layer_of(module)
    if layer not in THIRD_PARTY:
        yield f"{module}: {layer} is a new layer: give it a row in the tables of this test"
        return
    for line, name in imports(modules()[module]):
        top, _, rest = name.partition(".")
        if top == LAB.name:
            allowed = module.startswith(LAB.name) and _known(layer, f"lab.{rest}")
        elif top == PACKAGE.name:
            allowed = _known(layer, rest)
        else:
            allowed = top in sys.stdlib_module_names or top in THIRD_PARTY[layer].split()
        if not allowed:
            yield f"{module}:{line} imports {name}"


def test_imports_go_downwards() -> None:
    nowhere(imported_from_above)


def test_rules_see_the_lab() -> None:
    layers = {layer_of(module) for module in modules() if module.startswith(LAB.name)}
    assert layers == {"lab", "lab.cli", "lab.simulation"}


def test_the_product_does_without_the_lab() -> None:
    """It would be missing where only the product is installed."""
    importers = [
        module
        for module, tree in modules().items()
        if module.startswith(f"{PACKAGE.name}.") and any(n.startswith(LAB.name) for _, n in imports(tree))
    ]
    assert importers == []


def test_hivemind_is_imported_by_its_bindings_only() -> None:
    importers = [
        m for m, tree in modules().items() if any(n.split(".")[0] == "hivemind" for _, n in imports(tree))
    ]
    assert importers == ["p2pdiloco.adapters.hivemind_binding"]


def impure(module: str) -> Iterator[str]:
    if layer_of(module) not in {"core", "lab.simulation"}:
        return
    tree = modules()[module]
    for line, name in imports(tree):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names:
            seeded = top != "random" or name in {"random", "random.Random"}
            if top not in PURE_STDLIB or not seeded:
                yield f"{module}:{line} imports {name}"
    for line, name, node in calls(tree):
        if name in {"open", "print", "input"}:
            yield f"{module}:{line} calls {name}"
        if name in {"Random", "random.Random"}:
            if not node.args:
                yield f"{module}:{line}: Random() without a seed draws it from the machine"
        elif name.startswith("random."):
            yield f"{module}:{line} calls {name}: the process's own generator"


def test_core_and_simulation_are_pure() -> None:
    nowhere(impure)


KNOW_EACH_OTHER = ("p2pdiloco_lab.simulation.", "p2pdiloco_lab.bulk_world.")
"""Host or member, world and rules of a simulator are one thing in several files."""
PACKAGES = {
    ".".join(path.parent.relative_to(top.parent).parts)
    for top in (PACKAGE, LAB)
    for path in top.rglob("__init__.py")
}


def one(module: str) -> str:
    """Name of a module, or of the simulator that it is a part of."""
    return next((name for name in KNOW_EACH_OTHER if module.startswith(name)), module)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Find the names of a circle, in order; none: there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_circles_are_found() -> None:
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()})
    assert not circle({"a": {"b", "d"}, "b": {"c", "d"}, "c": {"d"}})


def test_no_module_imports_what_imports_it() -> None:
    graph: dict[str, set[str]] = {}
    for module in modules():
        graph.setdefault(one(module), set()).update(
            {one(name) for name in imported_modules(module)} - {one(module)}
        )
    assert circle(graph) == []


def through_packages(module: str) -> Iterator[str]:
    for name, line in imported_modules(module).items():
        if name in PACKAGES:
            yield f"{module}:{line} imports from the __init__ of {name}"


def test_names_are_imported_from_where_they_are_defined() -> None:
    """A package imports nothing for others: a circle through its `__init__` would be seen by nobody."""
    nowhere(through_packages)


def test_packages_do_nothing_when_they_are_imported() -> None:
    done = {
        package: [ast.unparse(node) for node in modules()[package].body if not isinstance(node, ast.Expr)]
        for package in PACKAGES - {"p2pdiloco"}
    }
    assert {package: code for package, code in done.items() if code} == {}
