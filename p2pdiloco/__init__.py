"""p2pdiloco: peer-to-peer decentralized training with Decoupled DiLoCo (arXiv 2604.21428)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from p2pdiloco.release import VERSION as __version__
from p2pdiloco.release import WIRE_VERSION

if TYPE_CHECKING:
    from p2pdiloco.errors import ConfigError, StorageError, UserError
    from p2pdiloco.session import Session, new_run

__all__ = ["WIRE_VERSION", "ConfigError", "Session", "StorageError", "UserError", "__version__", "new_run"]


_MODULES = {
    "Session": "session",
    "new_run": "session",
    "ConfigError": "errors",
    "StorageError": "errors",
    "UserError": "errors",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: some of it needs torch, and a command hears a stop the sooner, the
    less is imported before."""
    if name in _MODULES:
        return getattr(import_module(f"p2pdiloco.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names that programs use, those included that are imported when they are asked for."""
    return sorted(__all__)
