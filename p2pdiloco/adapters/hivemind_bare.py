"""Imported before hivemind: its package without what its `__init__` imports beside p2p and dht.

`import hivemind` loads averager, optimizer and mixture of experts, and with them scipy: a quarter of the
daemon's start (2.6 s of CPU to 2.0 s). A peer that comes back is waited for; none of these is used here.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def load_bare(name: str) -> None:
    """Make the package importable without running its `__init__`. Nothing if it is loaded or missing."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        return
    module = ModuleType(name)
    module.__path__ = list(spec.submodule_search_locations)
    module.__spec__ = spec
    module.__file__ = spec.origin
    sys.modules[name] = module


load_bare("hivemind")
