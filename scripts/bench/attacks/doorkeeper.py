"""`doorkeeper.py … p2pdiloco node …`: a member that admits whoever shows an invite, used up or not.

Nothing but that differs from any other node's code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from p2pdiloco.cli.main import main as command
from p2pdiloco.core.api.papers import Grant
from p2pdiloco.core.api.reasons import AdmissionFault
from p2pdiloco.daemon.admission import Register


def admit_anybody() -> None:
    """Let every sound grant let everybody in."""

    def never_closed(_register: Register, _grant: Grant, _peer: str, _vouched: bool) -> AdmissionFault | None:
        return None

    Register._closed = never_closed  # type: ignore[method-assign, assignment]


def main(words: Sequence[str]) -> None:
    """Run the command after the word p2pdiloco."""
    admit_anybody()
    sys.argv = ["p2pdiloco", *words[words.index("p2pdiloco") + 1 :]]
    command()


if __name__ == "__main__":
    main(sys.argv[1:])
