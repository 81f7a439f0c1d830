"""Error of a payload that a peer sent, with the word on it that its sender hears."""

from __future__ import annotations

from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.errors import RemoteError


class Unsound(RemoteError):
    """Error: a payload is not what it should be."""

    def __init__(self, verdict: Verdict, detail: str = "") -> None:
        super().__init__(verdict.value, detail)
        self.verdict = verdict
