"""What a start must not cost."""

from __future__ import annotations

import subprocess
import sys

import pytest
from deadlines import within_s


@pytest.mark.process
@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("p2pdiloco.daemon.node", {"scipy", "torch._dynamo"}),
        ("p2pdiloco.daemon.bootstrap", {"scipy", "torch"}),
        ("p2pdiloco.cli.status", {"scipy", "torch"}),
    ],
)
def test_nothing_loads_what_it_does_not_use(modules: str, unwanted: set[str]) -> None:
    code = f"import sys, {modules}; sys.exit(bool({unwanted} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=within_s(120)).returncode == 0
