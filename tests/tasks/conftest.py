"""Fixtures of tests of tasks."""

from token_files import trained

__all__ = ["trained"]
