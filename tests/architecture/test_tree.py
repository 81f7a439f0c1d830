"""ARCHITECTURE.md names every file of the package, once, with a phrase, and none that is not there."""

from __future__ import annotations

import re
import subprocess

from arch_source import ROOT

LINE = re.compile(r"^(?P<indent> *)(?P<name>[\w/.<>-]+)(?: +(?P<phrase>\S.*))?$")


def documented() -> dict[str, str]:
    """Path -> phrase, of the files under p2pdiloco/ in the annotated tree."""
    tree = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("## The tree")[1].split("```")[1]
    found: dict[str, str] = {}
    folders: list[str] = []
    for line in tree.strip("\n").splitlines():
        match = LINE.match(line)
        if match is None:
            continue
        folders = folders[: len(match["indent"]) // 2]
        name = match["name"]
        if name.endswith("/"):
            folders.append(name)
            continue
        path = "".join(folders) + name
        assert path not in found, f"{path} is in the tree twice"
        found[path] = match["phrase"] or ""
    return {path: phrase for path, phrase in found.items() if path.startswith("p2pdiloco/")}


def tracked() -> set[str]:
    """Files under p2pdiloco/ that git tracks; all Python files there where there is no git."""
    answer = subprocess.run(
        ["git", "ls-files", "p2pdiloco"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if answer.returncode == 0 and answer.stdout:
        return {path for path in answer.stdout.splitlines() if (ROOT / path).exists()}
    return {str(path.relative_to(ROOT)) for path in (ROOT / "p2pdiloco").rglob("*.py")}


def test_every_file_of_the_package_is_in_the_annotated_tree() -> None:
    assert tracked() - set(documented()) == set(), "give each a phrase in ARCHITECTURE.md, 'The tree'"


def test_the_tree_names_nothing_that_is_not_there() -> None:
    assert [path for path in documented() if not (ROOT / path).exists()] == []


def test_every_file_has_a_phrase() -> None:
    assert [path for path, phrase in documented().items() if not phrase] == []
