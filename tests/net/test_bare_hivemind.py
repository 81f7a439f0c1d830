"""What a daemon's start must not cost."""

from __future__ import annotations

import subprocess
import sys


def test_the_daemon_does_not_load_what_it_does_not_use() -> None:
    code = "import sys, p2pdiloco.daemon.main; sys.exit(bool({'scipy', 'torch._dynamo'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=120).returncode == 0
