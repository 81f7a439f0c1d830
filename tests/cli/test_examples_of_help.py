"""Every command's help has an example, and the examples are what the command takes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from p2pdiloco.cli.from_lab import loaded
from p2pdiloco.cli.group import cli
from p2pdiloco.cli.options import EXAMPLES


def commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", loaded(command)


ALL = dict(commands(cli))


def examples(command: click.Command) -> list[list[str]]:
    """Words of the lines of its help from "Example:" on that are commands of ours, without remarks."""
    context = click.Context(command, max_content_width=200, terminal_width=200)
    _, found, text = command.get_help(context).partition("Example:")
    lines = [line.strip() for line in text.splitlines()] if found else []
    said = [re.split(r" {3,}| > ", line)[0] for line in lines if line.startswith("p2pdiloco ")]
    return [shlex.split(line)[1:] for line in said]


@pytest.mark.parametrize("path", ALL)
def test_the_help_has_an_example_that_parses(path: str) -> None:
    command, name = ALL[path], path.split()
    own = [words for words in examples(command) if words[: len(name)] == name]
    assert own, "write an example into its docstring, or p2pdiloco/cli/options.py"
    for words in own:
        command.make_context(path, words[len(name) :])


def test_no_example_is_of_another_command() -> None:
    assert EXAMPLES.keys() <= ALL.keys()


@pytest.mark.process
def test_words_are_completed() -> None:
    """As docs/topics/joining.md says, by click's own."""
    told = {"_P2PDILOCO_COMPLETE": "bash_complete", "COMP_WORDS": "p2pdiloco run l", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", "from p2pdiloco.cli.group import cli; cli(prog_name='p2pdiloco')"],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["plain,link"], done.stderr
