"""CHANGELOG.md states the formats that the code has: who raises one has to say so there."""

from __future__ import annotations

import ast

import pytest
from arch_source import ROOT, modules

FORMATS = {
    ("p2pdiloco.release", "WIRE_VERSION"): "wire version {}",
    ("p2pdiloco.config.manifest", "FORMAT"): "manifest format {}",
    ("p2pdiloco.learner.checkpoint", "FORMAT"): "learner state format {}",
    ("p2pdiloco.adapters.disk.containers", "CHECKPOINT_FORMAT"): "checkpoints `{}`",
}


def constant(module: str, name: str) -> object:
    """What a module assigns to a name, read without importing it."""
    for node in modules()[module].body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} has no {name}")


@pytest.mark.parametrize(("module", "name"), FORMATS)
def test_the_changelog_states_every_format(module: str, name: str) -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    formats = " ".join(text.split("### Wire and checkpoint format\n")[1].split("\n- ")[0].split())
    words = FORMATS[module, name].format(constant(module, name))
    assert f"{words}," in formats or f"{words}." in formats, f"CHANGELOG.md lacks {words!r}"
