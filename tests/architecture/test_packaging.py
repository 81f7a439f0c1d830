"""What is shipped: one top-level name, pinned versions, licence, a command that exists; notes, a citation, a
workflow whose actions are pinned and that may only read."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import subprocess
import sys
import tomllib
from itertools import chain

import pytest
import yaml
from arch_source import LAB, PACKAGE, ROOT
from packaging.requirements import Requirement
from setuptools import find_packages

import p2pdiloco
from p2pdiloco.cli.from_lab import CHAOS, GROUP, SIMULATE

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OF_LAB = tomllib.loads((LAB.parent / "pyproject.toml").read_text())


def test_the_wheel_has_one_top_level_name_and_all_of_our_code() -> None:
    found = find_packages(str(ROOT), include=PROJECT["tool"]["setuptools"]["packages"]["find"]["include"])
    assert {name.split(".")[0] for name in found} == {"p2pdiloco"}
    folders = {p.parent.relative_to(ROOT) for p in PACKAGE.rglob("*.py")}
    assert {".".join(folder.parts) for folder in folders} == set(found)


def test_the_lab_is_a_distribution_of_its_own_of_the_same_release() -> None:
    found = find_packages(
        str(LAB.parent), include=OF_LAB["tool"]["setuptools"]["packages"]["find"]["include"]
    )
    folders = {p.parent.relative_to(LAB.parent) for p in LAB.rglob("*.py")}
    assert {".".join(folder.parts) for folder in folders} == set(found)
    ours, its = PROJECT["project"], OF_LAB["project"]
    assert its["version"] == p2pdiloco.__version__ and its["requires-python"] == ours["requires-python"]
    assert its["name"] == "p2pdiloco-lab" and its["license"] == ours["license"]
    assert (LAB / "py.typed").exists() and "lab/p2pdiloco_lab *.py" in (ROOT / "MANIFEST.in").read_text()


def test_no_name_is_asked_of_a_registry_that_nobody_has_registered() -> None:
    """Anybody could register it, and what they put there would be installed."""
    wanted = [*PROJECT["project"]["dependencies"], *OF_LAB["project"]["dependencies"]]
    assert not [name for name in wanted if "p2pdiloco" in name]


def test_the_labs_commands_are_there_and_the_product_names_them() -> None:
    entries = OF_LAB["project"]["entry-points"][GROUP]
    assert entries.keys() == {CHAOS.name, SIMULATE.name}
    for place in (CHAOS, SIMULATE):
        module, _, name = entries[str(place.name)].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert command.name == place.name
        assert command.get_short_help_str(200) == place.get_short_help_str(200)


def test_operators_folders_hold_no_importable_code() -> None:
    # Packages called node and bootstrap would end up beside everyone else's in site-packages.
    assert [p for role in ("node", "bootstrap") for p in (ROOT / role).rglob("*.py")] == []


@pytest.mark.parametrize("requirement", [
    *PROJECT["project"]["dependencies"],
    *OF_LAB["project"]["dependencies"],
    *(line for extra in PROJECT["project"]["optional-dependencies"].values() for line in extra),
])  # fmt: skip
def test_every_requirement_is_pinned_within_its_range(requirement: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    wanted = Requirement(requirement)
    pinned = {_normal(name): version for name, version in pins.items()}.get(_normal(wanted.name))
    assert pinned is not None and "+" not in pinned
    assert wanted.specifier.contains(pinned)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_console_script_exists() -> None:
    module, _, name = PROJECT["project"]["scripts"]["p2pdiloco"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_licence_is_the_one_that_is_declared() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS" in text


def test_what_is_shipped_says_that_it_has_types() -> None:
    shipped = PROJECT["tool"]["setuptools"]["package-data"]["p2pdiloco"]
    assert "py.typed" in shipped and (PACKAGE / "py.typed").exists()


def test_the_release_is_the_one_that_the_changelog_begins_with_and_that_is_cited() -> None:
    module, _, name = PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    version = getattr(importlib.import_module(module), name)
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert version == p2pdiloco.__version__ and first is not None and first[1] == version
    assert f"\nVersion {version}" in (ROOT / "README.md").read_text()
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == version and "2604.21428" in str(cited["references"])


def test_the_package_shows_what_programs_use_and_imports_no_torch_for_it() -> None:
    wanted = {"Session", "new_run", "UserError", "ConfigError", "StorageError", "__version__"}
    code = "import sys, p2pdiloco; print(*dir(p2pdiloco)); sys.exit('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert wanted <= set(said.stdout.split())
    assert wanted <= set(p2pdiloco.__all__) and all(hasattr(p2pdiloco, name) for name in p2pdiloco.__all__)


def test_versions_of_python_are_the_same_everywhere() -> None:
    wanted = PROJECT["project"]["requires-python"]
    assert wanted == ">=3.11,<3.15"
    for file in ("setup.py", "scripts/setup"):
        text = (ROOT / file).read_text()
        assert "(3, 11) <= sys.version_info" in text and "< (3, 15)" in text, file
        assert "Python 3.11 to 3.14" in text, file
    assert "Python 3.11 to 3.14" in (ROOT / "README.md").read_text()


def test_the_wheel_carries_what_operators_copy() -> None:
    shipped = {file for files in PROJECT["tool"]["setuptools"]["data-files"].values() for file in files}
    wanted = {"constraints.txt"} | {
        str(path.relative_to(ROOT)) for role in ("node", "bootstrap") for path in (ROOT / role).iterdir()
    }
    assert wanted <= shipped and all((ROOT / file).is_file() for file in shipped)


def test_what_a_bootstrap_installs_is_pinned_and_has_no_torch_and_it_imports_nothing_else() -> None:
    lines = (ROOT / "bootstrap" / "requirements.txt").read_text().splitlines()
    names = {_normal(line) for line in lines if line and not line.startswith("#")}
    pinned = {_normal(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert names <= pinned and "torch" not in names
    code = (
        "import sys, json, importlib.metadata as m; import p2pdiloco.cli.group, p2pdiloco.daemon.bootstrap;"
        "found = m.packages_distributions();"
        "tops = {name.partition('.')[0] for name in sys.modules};"
        "print(json.dumps([d for top in tops for d in found.get(top, ())]))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    used = {_normal(name) for name in json.loads(said.stdout)}
    assert used - {"p2pdiloco", "setuptools", "pip"} <= names


@pytest.mark.parametrize("command", [["node", "--join", "ADDRESS"], ["eval", "--data-dir", "."]])
def test_commands_that_need_torch_say_so_where_it_is_not_installed(command: list[str]) -> None:
    address = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWJbJFaZ1dwpuu9tQY3ELCKCpWMJc1dSRVbcMwhiLiFq7q"
    words = [address if word == "ADDRESS" else word for word in command]
    code = f"""
import sys
class No:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'torch':
            raise ModuleNotFoundError(f'no {{name}}', name='torch')
sys.meta_path.insert(0, No())
from p2pdiloco.cli.group import run
sys.exit(run({words!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "this needs PyTorch" in done.stderr and "Traceback" not in done.stderr


def test_the_page_is_in_the_wheel_and_small() -> None:
    shipped = PROJECT["tool"]["setuptools"]["package-data"]["p2pdiloco"]
    page = PACKAGE / "web" / "page"
    files = {p for folder in ("templates", "static") for p in (page / folder).rglob("*") if p.is_file()}
    assert files == {path for pattern in shipped if "page" in pattern for path in PACKAGE.glob(pattern)}
    static = [path for path in files if path.parent.name == "static"]
    assert sum(path.stat().st_size for path in static) < 90_000, (
        "the page has 150 kB in all, its HTML included"
    )


@pytest.mark.parametrize("name, digest", [
    ("uplot.js", "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"),
    ("uplot.css", "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"),
])  # fmt: skip
def test_what_is_not_ours_is_unchanged_and_its_licence_shipped(name: str, digest: str) -> None:
    data = (PACKAGE / "web" / "page" / "static" / name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == digest
    notice = (ROOT / "NOTICE").read_text()
    assert name in notice and "The MIT License (MIT)" in notice and "Leon Sorokin" in notice
    assert "NOTICE" in PROJECT["project"]["license-files"]


WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"


def test_the_workflow_does_what_ci_does_with_pinned_actions_and_no_rights() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    jobs = workflow["jobs"].values()
    steps = list(chain.from_iterable(job["steps"] for job in jobs))
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job or "env" in job for job in jobs)
    assert "secrets" not in WORKFLOW.read_text(encoding="utf-8")
    used = {step["uses"] for step in steps if "uses" in step}
    assert used and all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action) for action in used)
    commands = {step["run"].split("python")[0].strip() for step in steps if "run" in step}
    here = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert commands - {"scripts/release"} == {"make test </dev/null", "scripts/core"}
    assert all(command in here for command in commands - {"scripts/release"})


def test_templates_of_issues_are_forms_that_a_forge_can_read() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in folder.glob("[!c]*.yml")]
    assert len(forms) == 3
    for form in forms:
        assert {"name", "description", "body"} <= set(form)
        asked = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(asked) == len(set(asked)) > 1


def test_the_tools_of_a_release_are_pinned_and_not_among_the_others() -> None:
    script = (ROOT / "scripts" / "release").read_text(encoding="utf-8")
    assert re.search(r"^tools=\(build==[\d.]+ twine==[\d.]+\)$", script, flags=re.MULTILINE)
    assert '/twine" check --strict' in script and "upload " not in script
    assert "twine" not in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_a_release_takes_nothing_from_the_checkout_but_its_commit() -> None:
    """What was changed there and not committed would be tried with the release, and is no part of it."""
    script = (ROOT / "scripts" / "release").read_text(encoding="utf-8")
    for option in ("-c", "-r", "grep -q .*?"):
        (read,) = re.findall(rf'\s{option} "?(\S+\.(?:txt|md))', script)
        assert read.startswith("$work/source/"), read
