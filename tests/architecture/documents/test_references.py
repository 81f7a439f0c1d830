"""References of settings, manifest and commands are those of the code, and complete."""

from __future__ import annotations

import click
import msgspec
import pytest

import references
from p2pdiloco.config.comments import COMMENTS
from p2pdiloco.config.settings import BootstrapSettings, NodeSettings


def test_the_references_are_those_of_the_code() -> None:
    assert references.main(["--check"]) == 0, "run python scripts/references.py"


def rows(page: str) -> list[list[str]]:
    """Cells of all rows of a page's tables, but for their heads."""
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.replace(r"\|", "/").strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("name", references.PAGES)
def test_every_row_says_something(name: str) -> None:
    assert [row for row in rows(references.PAGES[name]()) if not row[0] or not row[-1]] == []


def test_every_setting_is_there() -> None:
    found = [row[0].rpartition("<br>")[2].strip("`") for row in rows(references.settings_page())]
    fields = [*msgspec.structs.fields(NodeSettings), *msgspec.structs.fields(BootstrapSettings)]
    assert sorted(found) == sorted(field.name for field in fields)


def test_every_key_of_the_manifest_is_there() -> None:
    page = references.manifest_page()
    for key in COMMENTS:
        section, _, name = key.rpartition(".")
        assert f"`{name}`" in page.partition(f"## [{section}]" if section else "# ")[2].partition("\n## [")[0]


def test_every_command_is_there() -> None:
    page = references.commands_page()
    paths = dict(references.leaves(references.cli))
    assert all(f"\n## {path}\n" in page and f"](#{path.replace(' ', '-')})" in page for path in paths)
    hidden = [c for c in paths.values() if any(isinstance(p, click.Option) and p.hidden for p in c.params)]
    assert not hidden
