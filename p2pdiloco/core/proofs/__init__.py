"""Lies that anybody can check: who is shown to have told one is excluded for good."""
