"""Bare packages of hivemind, without what their `__init__` imports beside p2p and dht.

Imported before it: `import hivemind` loads averager, optimizer and mixture of experts, and with them scipy;
`hivemind.dht` and `hivemind.utils` load torch, for futures and descriptions of tensors. None of these is used
here. So a process that only talks to peers (a bootstrap, `p2pdiloco status`) has no torch in memory: 40 MB
for 235, 0.15 s of CPU for 1.3."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType


def load_bare(name: str, has: Mapping[str, Sequence[str]] | None = None) -> None:
    """Make the package importable without running its `__init__`. Without effect if it is loaded or missing.

    `has`: names that others import from the package itself, by the module in it that defines them.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        return
    module = ModuleType(name)
    module.__path__ = list(spec.submodule_search_locations)
    module.__spec__ = spec
    module.__file__ = spec.origin
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    for part, names in (has or {}).items():
        defining = importlib.import_module(f"{name}.{part}")
        for each in names:
            setattr(module, each, getattr(defining, each))


load_bare("hivemind")
load_bare("hivemind.dht")
load_bare(
    "hivemind.utils",
    {
        "logging": ("get_logger",),
        "serializer": ("MSGPackSerializer", "SerializerBase"),
        "timed_storage": ("get_dht_time",),
    },
)
