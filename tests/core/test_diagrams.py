"""The state diagrams that people read are those of the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("diagrams", ROOT / "scripts" / "diagrams.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not (ROOT / "ARCHITECTURE.md").exists(), reason="no ARCHITECTURE.md here")
def test_the_committed_diagrams_are_fresh(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0, "run python scripts/diagrams.py"


def test_stale_diagrams_are_replaced_and_all_else_is_kept(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "ARCHITECTURE.md"
    document.write_text(f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n")
    monkeypatch.setattr(script, "DOCUMENT", document)
    assert script.main(["--check"]) == 1
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("stateDiagram-v2") == 4 and "COLLECTING --> CLOSING: QUORUM" in text


def test_a_document_without_markers_is_not_touched(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="diagrams:begin"):
        script.drawn("no markers")
