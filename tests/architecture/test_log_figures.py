"""Figures of log lines have names: `--log json` has them in `fields`, so that nobody parses sentences."""

from __future__ import annotations

import ast
import re

import pytest
from arch_source import modules

FIGURE = re.compile(r"%[-+ #0]*[\d.]*[diefgGxX]")
DAEMONS = [name for name in modules() if name.startswith(("p2pdiloco.daemon", "p2pdiloco.adapters"))]


@pytest.mark.parametrize("module", DAEMONS)
def test_figures_of_log_lines_have_names(module: str) -> None:
    texts = [
        part.value
        for call in ast.walk(modules()[module])
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("logger.")
        if ast.unparse(call.func) != "logger.debug"
        for part in ast.walk(call)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    assert [text for text in texts if FIGURE.search(text)] == []
