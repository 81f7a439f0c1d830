"""p2pdiloco: peer-to-peer decentralized training with Decoupled DiLoCo (arXiv 2604.21428)."""

from typing import TYPE_CHECKING, Any

from p2pdiloco.errors import ConfigError, StorageError, UserError
from p2pdiloco.release import VERSION as __version__
from p2pdiloco.release import WIRE_VERSION

if TYPE_CHECKING:
    from p2pdiloco.own_run import new_run
    from p2pdiloco.session import Session

__all__ = ["WIRE_VERSION", "ConfigError", "Session", "StorageError", "UserError", "__version__", "new_run"]


def __getattr__(name: str) -> Any:
    """Import `Session` and `new_run` when they are asked for, since they need torch."""
    if name == "Session":
        from p2pdiloco.session import Session

        return Session
    if name == "new_run":
        from p2pdiloco.own_run import new_run

        return new_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names that programs use, those included that are imported when they are asked for."""
    return sorted(__all__)
