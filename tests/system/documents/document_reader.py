"""What documents tell people to type: blocks of commands, with what they are said to print, by file and line.

A block is fenced as ```console. In it `$ ` begins a command, ` \\` continues it on the next line, and other
lines are what is printed, shortened with `…`. `# status 3` at a command's end is its exit status. On the line
before a block may stand `<!-- not run: why -->`, or `<!-- machine: NAME -->`: it is typed on another machine
than the others of the document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

PROMPT = "$ "
NOT_RUN = re.compile(r"<!-- not run: (?P<why>\S.*?) -->")
MACHINE = re.compile(r"<!-- machine: (?P<name>[a-z]+) -->")
STATUS = re.compile(r"\s# .*\bstatus (?P<status>\d+)")
SHOWN = frozenset({"console", "python", "text", "toml", "json", "yaml"})
"""How a block may be fenced. Of these people copy commands from the first only."""


class Unreadable(ValueError):
    """A document does not keep to the form. Says where."""


@dataclass(frozen=True)
class Command:
    """One command, as it stands there, comments and all."""

    where: str
    text: str
    printed: tuple[str, ...] = ()

    @property
    def status(self) -> int:
        found = STATUS.search(self.text)
        return int(found["status"]) if found else 0


@dataclass(frozen=True)
class Block:
    """Commands of one fence."""

    where: str
    commands: tuple[Command, ...]
    machine: str = "here"
    not_run: str = ""
    """Why it is not."""


@dataclass(frozen=True)
class Snippet:
    """A fence of another language."""

    where: str
    language: str
    text: str
    not_run: str = ""


def blocks(path: Path, name: str) -> list[Block]:
    """All blocks of commands of a document, which failures call `name`.

    Raises:
        Unreadable: something in it looks like a command and is none that could be run.
    """
    return [
        Block(s.where, tuple(_commands(s)), _machine(said), s.not_run)
        for s, said in _fences(path, name)
        if s.language == "console"
    ]


def snippets(path: Path, name: str, language: str) -> list[Snippet]:
    """All fences of that language. Raises: Unreadable."""
    return [snippet for snippet, _ in _fences(path, name) if snippet.language == language]


def inline(path: Path, name: str) -> list[Command]:
    """Commands of ours that sentences and tables name, `p2pdiloco node --name anna` and the like."""
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8")):
        for child in token.children or []:
            words = " ".join(child.content.split())
            if child.type == "code_inline" and words.startswith("p2pdiloco "):
                found.append(Command(f"{name}:{token.map[0] + 1 if token.map else '?'}", words))
    return found


def _fences(path: Path, name: str) -> Iterator[tuple[Snippet, str]]:
    """Each fence, and the comment on the line before it, if there is one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for token in MarkdownIt("commonmark").parse("\n".join(lines)):
        if token.type not in ("fence", "code_block"):
            continue
        assert token.map is not None
        first = token.map[0]
        where, language = f"{name}:{first + 1}", token.info.strip()
        if token.type == "code_block" or language not in SHOWN:
            raise Unreadable(f"{where}: a block is fenced, as one of {', '.join(sorted(SHOWN))}")
        if language != "console" and re.search(r"^(\$ |p2pdiloco )", token.content, re.M):
            raise Unreadable(f"{where}: commands stand in a block that is fenced as console")
        before = lines[first - 1].strip() if first else ""
        said = before if before.startswith("<!--") else ""
        if said and not NOT_RUN.fullmatch(said) and not MACHINE.fullmatch(said):
            raise Unreadable(f"{name}:{first}: neither `<!-- not run: why -->` nor `<!-- machine: NAME -->`")
        refused = NOT_RUN.fullmatch(said)
        yield Snippet(where, language, token.content, refused["why"] if refused else ""), said


def _machine(said: str) -> str:
    found = MACHINE.fullmatch(said)
    return found["name"] if found else "here"


def _commands(fence: Snippet) -> Iterator[Command]:
    name, _, number = fence.where.rpartition(":")
    at, text, printed = "", "", list[str]()
    goes_on = False
    for line, content in enumerate(fence.text.splitlines(), int(number) + 1):
        if goes_on:
            text += "\n" + content
        elif content.startswith(PROMPT):
            if text:
                yield Command(at, text, tuple(printed))
            at, text, printed = f"{name}:{line}", content.removeprefix(PROMPT), []
        elif not text and content.strip():
            raise Unreadable(f"{name}:{line}: a command begins with `{PROMPT}`")
        elif content.strip():
            printed.append(content)
        goes_on = (goes_on or content.startswith(PROMPT)) and content.endswith("\\")
    if not text:
        raise Unreadable(f"{fence.where}: no command is in it")
    if goes_on:
        raise Unreadable(f"{at}: the command goes on, and nothing follows")
    yield Command(at, text, tuple(printed))
