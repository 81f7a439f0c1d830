"""Marks of what should hold and does not yet, and of what a test of it takes for granted."""

from __future__ import annotations

import pytest


def known_flaw(why: str) -> pytest.MarkDecorator:
    """Expect a false assertion, and no other error. The test fails once it passes: then the mark goes."""
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=why)


def given(condition: object, what: str) -> None:
    """Fail for good where a scene is not the one that a test of a known flaw is about."""
    if not condition:
        raise RuntimeError(f"the scene is another: {what}")
