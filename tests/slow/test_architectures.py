"""Every causal architecture of the pinned transformers, through a run and back (`make slow`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

transformers = pytest.importorskip("transformers")
from survey.journey import WRONG, outcome  # noqa: E402
from survey.page import CLASSES, PAGE, row  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


def rows() -> list[str]:
    return [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")][1:]


def test_all_are_accounted_for() -> None:
    assert [line.split("`")[1] for line in rows()] == list(CLASSES)
    assert not [line for line in rows() if f"| {WRONG}" in line]
    words = f"transformers` {transformers.__version__} was sent through a run: {len(CLASSES)} names of"
    assert words in PAGE.read_text(encoding="utf-8"), "run python scripts/architectures.py"


@pytest.mark.parametrize("kind", CLASSES)
def test_an_architecture_comes_through_or_is_refused_in_a_sentence(kind: str) -> None:
    found = outcome(kind)
    assert found.verdict != WRONG, found.words
    assert row(found) in rows(), "run python scripts/architectures.py"


@pytest.mark.parametrize(
    ("kind", "broken", "words"),
    [
        ("deepseek_v3", "p2pdiloco.tasks.description.put_constants", "logits of version 0 differ by"),
        ("gpt2", "p2pdiloco.tensors.vault.Vault.commit", "was not merged"),
        ("gpt2", "p2pdiloco.daemon.run_files.saved_state.rounded", "logits of its export differ by"),
    ],
)
def test_the_survey_sees_what_is_lost(
    kind: str, broken: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken, lambda *given: 2 * given[1] if broken.endswith("rounded") else None)
    found = outcome(kind)
    assert found.verdict == WRONG and words in found.words
