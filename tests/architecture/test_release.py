"""What goes with a release: notes, a citation, a workflow whose actions are pinned and that may only read."""

from __future__ import annotations

import re
from itertools import chain

import yaml
from arch_source import ROOT

from p2pdiloco.release import VERSION

WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"


def test_the_release_has_notes_and_is_the_one_that_is_cited() -> None:
    notes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(VERSION)}\b", notes, flags=re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == VERSION and "2604.21428" in str(cited["references"])


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
