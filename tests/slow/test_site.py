"""The documents as a site, as `make docs` builds it: no link of it is dead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    words = ["-q", "-W", "--keep-going", "-d", tmp_path / "trees", "-c", "docs", ".", tmp_path / "site"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "docs" / "index.html").is_file()
