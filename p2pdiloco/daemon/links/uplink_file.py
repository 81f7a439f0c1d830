"""Memory of what our uplink carried in an earlier life, believed for a day, until it is measured.

It is `<data_dir>/uplink.json`. Losing it costs the first minutes' rank among candidates for offices, nothing
else.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import msgspec

from p2pdiloco.util import read_note

logger = logging.getLogger(__name__)
MAX_AGE_S = 86_400.0
"""Age after which the file counts no more: the machine may be elsewhere by then."""


class RememberedUplink(msgspec.Struct, forbid_unknown_fields=True):
    """Content of the file."""

    bits_per_s: float
    at_s: float
    """Time of the measurement, in seconds since 1970."""


_decoder = msgspec.json.Decoder(RememberedUplink)


def _file(data_dir: Path) -> Path:
    return data_dir / "uplink.json"


def load_uplink(data_dir: Path) -> float:
    """Load the remembered rate in bits per second; infinite: there is none, or it is too old, or from the
    future."""
    known = read_note(_file(data_dir), _decoder.decode, logger.warning)
    if known is None:
        return math.inf
    fresh = 0 <= time.time() - known.at_s <= MAX_AGE_S
    return known.bits_per_s if fresh and known.bits_per_s > 0 else math.inf


def save_uplink(data_dir: Path, bits_per_s: float) -> None:
    """Save the rate that was measured in this life. A failure is logged: it costs this memory only."""
    if not bits_per_s < math.inf:
        return
    path = _file(data_dir)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(msgspec.json.encode(RememberedUplink(bits_per_s, time.time())))
        temporary.replace(path)
    except OSError as error:
        # A temporary file that may be left behind is overwritten the next time.
        logger.warning("what the uplink carries cannot be kept in %s: %s", path, error)
