"""Sentence for Pythons that are too old or too new, which pip shows; all else is in pyproject.toml."""

import sys

if not (3, 11) <= sys.version_info[:2] < (3, 15):
    here = ".".join(map(str, sys.version_info[:2]))
    sys.exit(
        "error: p2pdiloco needs Python 3.11 to 3.14, and this is " + here + ": make the environment with "
        "another one, as in python3.12 -m venv .venv"
    )

from setuptools import setup

setup()
