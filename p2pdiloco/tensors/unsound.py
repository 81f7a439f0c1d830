"""Error of a payload that a peer sent, with the word on it that its sender hears."""

from __future__ import annotations

from collections.abc import Mapping

from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.errors import RemoteError


class Unsound(RemoteError):
    """Error: a payload is not what it should be."""

    def __init__(self, verdict: Verdict, detail: str = "") -> None:
        super().__init__(verdict.value, detail)
        self.verdict = verdict


class UnusableInputs(Unsound):
    """Error of a merge: inputs in which a fault was found, all of them, so that the others can be merged."""

    def __init__(self, faults: Mapping[int, Unsound]) -> None:
        """`faults`: by index among the inputs and, after these, the partials. At least one."""
        first = next(iter(faults.values()))
        super().__init__(first.verdict, f"{len(faults)} unusable, the first: {first}")
        self.faults = faults
