"""The units let samples write what they name, hear the daemon's word, and leave it little else."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from deadlines import within_s
from test_examples import ROOT, commented

from p2pdiloco.config.settings import BootstrapSettings, NodeSettings, load_settings_table

ROLES = ["node", "bootstrap"]
WRITTEN = ("data_dir", "result_dir", "learner_socket")
"""Settings that name a path which is written."""
MOST_EXPOSED = 39
"""Exposure in tenths, of 100."""


def unit(role: str) -> dict[str, str]:
    """Directives of the unit, each with its last value."""
    text = (ROOT / role / f"p2pdiloco-{role}.service").read_text(encoding="utf-8")
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("role", ROLES)
def test_the_unit_lets_the_sample_write_what_it_names(role: str, tmp_path: Path) -> None:
    path = tmp_path / f"{role}.toml"
    path.write_text(commented(role), encoding="utf-8")
    values, found = load_settings_table(path, role), unit(role)
    assert found["ProtectSystem"] == "strict"
    folders = [Path(word.lstrip("-")) for word in found.get("ReadWritePaths", "").split()]
    folders += [Path("/var/lib") / found["StateDirectory"]]
    folders += [Path("/run") / found["RuntimeDirectory"]] if "RuntimeDirectory" in found else []
    named = [Path(values[key]) for key in WRITTEN if values.get(key)]
    assert named and all(any(p.is_relative_to(f) for f in folders) for p in named), (named, folders)
    assert found["Environment"] == f"HOME=/var/lib/{found['StateDirectory']}", "caches"


def test_node_and_bootstrap_of_the_samples_fit_on_one_machine() -> None:
    listens = [load_settings_table(ROOT / role / f"{role}.toml", role)["listen"] for role in ROLES]
    assert not set(listens[0]) & set(listens[1])
    assert NodeSettings().data_dir != BootstrapSettings().data_dir
    for role, (listen,) in zip(ROLES, listens, strict=True):
        assert listen in (ROOT / role / "Containerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("role", ROLES)
def test_the_unit_hears_what_the_daemon_says(role: str) -> None:
    found = unit(role)
    assert (found["Type"], found["NotifyAccess"]) == ("notify", "main")
    assert int(found["WatchdogSec"]) >= 60


@pytest.mark.process
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_the_unit_is_hardened(role: str) -> None:
    file = str(ROOT / role / f"p2pdiloco-{role}.service")
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        f"--threshold={MOST_EXPOSED}",
        "--no-pager",
        file,
    ]
    judged = subprocess.run(command, capture_output=True, text=True, timeout=within_s(60))
    if "nrecognized option" in judged.stderr:
        pytest.skip("a systemd that cannot judge a file")
    assert judged.returncode == 0, judged.stdout[-200:] + judged.stderr
