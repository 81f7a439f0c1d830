"""Entry points load what they need: the heavy packages of each are listed, and no others may come."""

from __future__ import annotations

import subprocess
import sys

import pytest
from deadlines import within_s

import p2pdiloco
from p2pdiloco.cli.board import run as write_board
from p2pdiloco.cli.credits_report import collect_credits
from p2pdiloco.cli.given_model import settings_lines
from p2pdiloco.cli.group import cli
from p2pdiloco.cli.main import main
from p2pdiloco.cli.main import run as run_command
from p2pdiloco.cli.owner_notice import reach_members
from p2pdiloco.cli.questions import ask_for_run
from p2pdiloco.cli.status_command import run as ask_status
from p2pdiloco.core.node import Core
from p2pdiloco.daemon.bootstrap import run_bootstrap
from p2pdiloco.daemon.learner_host import LearnerHost
from p2pdiloco.daemon.owner.control import ask as ask_node
from p2pdiloco.daemon.start import run_node
from p2pdiloco.learner.__main__ import main as begin_learner
from p2pdiloco.learner.loop import Training

HEAVY = {
    "PIL", "accelerate", "asyncio", "click", "cryptography", "datasets", "google", "grpc", "hivemind",
    "jinja2", "matplotlib", "msgspec", "numpy", "prometheus_client", "psutil", "pyarrow", "rich",
    "safetensors", "scipy", "segno", "sklearn", "starlette", "tokenizers", "torch", "torch._dynamo",
    "transformers", "uvicorn", "uvloop", "zeroconf",
}  # fmt: skip
"""Packages that take long to import, or much memory, or that an installation may lack."""
LOOP = Training.__module__
"""The learner's own code, which the daemon does without."""
TRANSPORT = "asyncio cryptography google hivemind msgspec numpy psutil rich safetensors uvloop"
COMMANDS = [[], *([name] for name in sorted(cli.commands))]
RUN = f"from {run_command.__module__} import run; "

ENTRIES = {
    "the package": (f"import {p2pdiloco.__name__}", ""),
    "the console script, before a stop counts": (f"import {main.__module__}", ""),
    "--help of the commands": (
        RUN + f"[run([*words, '--help']) for words in {COMMANDS}]",
        "click msgspec",
    ),
    "status where no node is": (RUN + "run(['status', '--data-dir', 'nothing'])", f"click {TRANSPORT}"),
    "status": (f"import {ask_status.__module__}", TRANSPORT),
    "board": (f"import {write_board.__module__}", TRANSPORT),
    "run new": (
        f"import {settings_lines.__module__}",
        "asyncio click cryptography msgspec numpy psutil rich safetensors",
    ),
    "run new --guide": (f"import {ask_for_run.__module__}", "asyncio click msgspec rich"),
    "controls of this machine's owner": (
        f"import {ask_node.__module__}",
        "asyncio cryptography msgspec psutil rich",
    ),
    "notices of an owner, credits": (
        f"import {reach_members.__module__}, {collect_credits.__module__}",
        f"click {TRANSPORT}",
    ),
    "bootstrap": (f"import {run_bootstrap.__module__}", TRANSPORT),
    "daemon": (f"import {run_node.__module__}", f"torch {TRANSPORT}"),
    "core": (f"import {Core.__module__}", "msgspec"),
    "the learner's parent": (f"import {LearnerHost.__module__}", "asyncio msgspec numpy torch"),
    "learner, before it watches its parent": (f"import {begin_learner.__module__}", "msgspec"),
}
"""Entry point -> its program, and what of `HEAVY` that loads."""


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_point_loads_what_it_needs(name: str) -> None:
    program, expected = ENTRIES[name]
    program += f"\nimport sys; print(*sorted({HEAVY | {LOOP}} & {{*sys.modules}}))"
    words = [sys.executable, "-P", "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=within_s(120), check=True)
    assert done.stdout.splitlines()[-1].split() == sorted(expected.split())
