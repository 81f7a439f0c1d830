"""`loss_node.py (reverses|hasty) … p2pdiloco node …`: a node that contributes the opposite of its learner's
work, or one that draws the conclusion from fewer loss audits, so that a test is short. Nothing else differs
from any other node's code."""

from __future__ import annotations

import sys

from torch import Tensor

from p2pdiloco.cli.main import main as command
from p2pdiloco.core import audit_state
from p2pdiloco.tensors.outer_update import Encoded, OwnContributions


def reversing() -> None:
    """Put the lie into this process."""
    honest = OwnContributions.encode

    def reversed_(self: OwnContributions, fragment: int, base: Tensor, sent: Tensor) -> Encoded:
        return honest(self, fragment, sent.clone(), base)

    OwnContributions.encode = reversed_  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] == "reverses":
        reversing()
    else:
        audit_state.ENOUGH = 8.0
    sys.argv = ["p2pdiloco", *sys.argv[sys.argv.index("p2pdiloco") + 1 :]]
    command()
