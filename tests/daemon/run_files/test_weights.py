"""What a learner weighs at most, read off a manifest."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from p2pdiloco.config.manifest import AdmissionSection, WeightSection
from p2pdiloco.config.presets import for_run
from p2pdiloco.core.api.config import Timing
from p2pdiloco.daemon.run_files.run import core_config, sign_run
from p2pdiloco.identity import Identity
from p2pdiloco.tasks.registry import render_toml


@pytest.mark.parametrize(("mode", "admits"), [("open", False), ("invite", True), ("list", True)])
def test_where_members_are_known_a_whole_period_weighs_in_full(
    mode: str, admits: bool, tmp_path: Path
) -> None:
    weight = WeightSection(largest_share=0.4, most_units=6.0)
    admission = msgspec.convert({"mode": mode}, AdmissionSection)
    plan = for_run("micro", "test")
    group = msgspec.structs.replace(plan.group, expected_members=24)
    manifest = msgspec.structs.replace(plan, admission=admission, weight=weight, group=group)
    path = tmp_path / "run.toml"
    path.write_text(render_toml(manifest))
    found = core_config(sign_run(path, Identity.generate())[0], (), Timing())
    assert (found.largest_share, found.most_units, found.admits) == (0.4, 6.0, admits)
    assert found.expected_members == manifest.group.expected_members == 24
