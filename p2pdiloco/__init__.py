"""p2pdiloco: peer-to-peer decentralized training with Decoupled DiLoCo (arXiv 2604.21428)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pdiloco.own_run import new_run as new_run
    from p2pdiloco.session import Session as Session

__version__ = "0.1.0"

WIRE_VERSION = 19
"""Raised whenever two builds can no longer understand each other's messages or checkpoints."""


def __getattr__(name: str) -> Any:
    """`Session` and `new_run`, which need torch: imported when they are asked for."""
    if name == "Session":
        from p2pdiloco.session import Session

        return Session
    if name == "new_run":
        from p2pdiloco.own_run import new_run

        return new_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
