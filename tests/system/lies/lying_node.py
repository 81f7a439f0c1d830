"""`lying_node.py … p2pdiloco node …`: a node that, as a syncer, puts a contribution into its versions which
its learner did not sign so. Nothing but the lie differs from any other node's code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from msgspec.structs import replace

from p2pdiloco.cli.main import main as command
from p2pdiloco.core.api.events import Measured
from p2pdiloco.core.api.types import Contributor
from p2pdiloco.core.publisher import MergedParts


def lying() -> None:
    """Put the lie into this process."""
    honest = MergedParts.listed

    def listed(self: MergedParts, measured: Sequence[Measured] = ()) -> tuple[Contributor, ...]:
        parts = honest(self, measured)
        if not measured or not parts:
            return parts  # what is to be merged, not yet what is said of it
        return (replace(parts[0], signature=bytes(64)), *parts[1:])

    MergedParts.listed = listed  # type: ignore[method-assign]


if __name__ == "__main__":
    lying()
    sys.argv = ["p2pdiloco", *sys.argv[sys.argv.index("p2pdiloco") + 1 :]]
    command()
