"""What the words of a document's commands mean here, and what lines of output are like."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import click

from p2pdiloco.cli.from_lab import loaded
from p2pdiloco.cli.group import cli

LOOPBACK = [
    (re.compile(r"/ip4/0\.0\.0\.0/tcp/\d+"), "/ip4/127.0.0.1/tcp/0"),
    (re.compile(r"(?<=--web[ =])0\.0\.0\.0:"), "127.0.0.1:"),
    (re.compile(r"--preset(?P<sign>[ =])(tiny|small|gpt2|350m|1\.3b)\b"), r"--preset\g<sign>micro"),
]
"""What is typed otherwise than it stands there: free ports of this machine only, and a small model."""

PAGE_PORT = re.compile(r"(?<=--web[ =])\d+\b(?!\.)|(?<=--web[ =]127\.0\.0\.1:)\d+|(?<=//127\.0\.0\.1:)\d+")

ELSEWHERE = [
    (re.compile(r"make demo\b.*"), "tests/system/test_demo.py"),
    (re.compile(r"p2pdiloco demo\b.*"), "tests/system/test_demo.py"),
    (re.compile(r"make (test|check)\b.*"), "is what runs this test"),
    (re.compile(r"git clone \S+( p2pdiloco)?( && cd p2pdiloco)?"), "this test runs in a clone"),
    (re.compile(r"cd p2pdiloco"), "this test runs in a clone"),
    (re.compile(r"python3(\.\d+)? -m venv \.venv"), "scripts/setup, with which every test begins"),
    (re.compile(r"(source|\.) \.venv/bin/activate"), "scripts/setup, with which every test begins"),
    (
        re.compile(r"(\.venv/bin/)?pip install -c constraints\.txt \S+"),
        "scripts/setup; test_documents looks for the extras in pyproject.toml",
    ),
]
"""Commands that are not typed again, and where they are."""

READS = {"cat", "curl", "echo", "grep", "head", "ls", "tail", "wc"}
PROGRAMS = READS | {"p2pdiloco", ".venv/bin/p2pdiloco", "python", "cd", "export", "cp", "mkdir", "mv", "rm"}
"""Nothing else is typed: it might reach for the network, or for this machine. A document says so."""

PRINTED = {
    "ADDRESS": re.compile(r"(?:--join|--initial_peers) (/\S+)"),
    "RUN": re.compile(r"--run ([0-9a-f]{8,})"),
    "LINK": re.compile(r"\bp2pdiloco:1\w+"),
    "INVITE": re.compile(r"^p2pdiloco:1\w+", re.M),
}
"""Placeholders, and how what stands for them is printed."""
PLACEHOLDER = re.compile(rf"\b({'|'.join(PRINTED)}|PEER|FOLDER)\b")


def substituted(text: str, port: Callable[[str], str]) -> str:
    """The command, on loopback. `port`: a free port in place of that of a page."""
    for pattern, other in LOOPBACK:
        text = pattern.sub(other, text)
    return PAGE_PORT.sub(lambda found: port(found[0]), text)


def elsewhere(text: str) -> str:
    """Where a command is run that is not run here; empty: nowhere."""
    bare = re.sub(r"\s+#.*", "", text).strip()
    return next((where for pattern, where in ELSEWHERE if pattern.fullmatch(bare)), "")


def programs(text: str) -> list[str]:
    """The first word of each command of a line."""
    words = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=True)
    words.whitespace_split = True
    words.commenters = "#"
    found, begins = [], True
    for word in words:
        if begins and "=" not in word:
            found.append(word)
        begins = set(word) <= set("&|;()") or (begins and "=" in word)
    return found


def unknown_flag(text: str) -> str:
    """What a command of ours does not have of what this one says; empty: nothing."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    command: click.Command = cli
    while isinstance(command, click.Group):
        words = words[1:]
        if not words or words[0].startswith("-"):
            break
        if words[0] not in command.commands:
            return f"there is no command {words[0]}"
        command = loaded(command.commands[words[0]])
    flags = {
        o for p in command.params if isinstance(p, click.Option) for o in (*p.opts, *p.secondary_opts)
    } | {"--help", "-h"}
    said = [re.split(r"[=`,;]", word)[0] for word in words if re.match(r"--?[a-z]", word)]
    missing = [word for word in said if not set(word.split("/")) <= flags]
    return f"there is no {missing[0]}" if missing else ""


ALIKE: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"…(?=[A-Za-z]*[A-Z0-9])\w{6}\b"), r"…\w{6}"),
    (re.compile("…"), ".*"),
    (re.compile(r"\s+"), r"\s+"),
    (re.compile(rf"\b(?:{'|'.join(PRINTED)}|PEER|FOLDER)\b"), r"\S+"),
    (re.compile(r"\bp2pdiloco(:?)1\w+"), r"p2pdiloco:?1\w*"),
    (re.compile(r"\b12D3KooW\w*"), r"12D3KooW\w*"),
    (re.compile(r"/ip4/[\d.]+/tcp/"), r"/ip4/[\d.]+/tcp/"),
    (re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,}\b"), r"[0-9a-f]{7,}"),
    (re.compile(r"\d[\d.,:-]*(?: ?[kKMGT]i?B?\b)?"), r"\d[\d.,:-]*(?: ?[kKMGT]i?B?\b)?"),
    (re.compile(r"(?<=\d )(members|learners|merges|steps|addresses|nodes)\b"), r"[a-z]+"),
]
"""What of a line of output may be otherwise than it stands there: figures, ids, what is left out."""
QUESTION = re.compile(r"\? \[[a-zA-Z/]+\] \w*$")
"""Of somebody at a terminal, which there is none here; `--yes` is said for them."""


def as_pattern(line: str) -> re.Pattern[str]:
    """What a line of output is to look like."""
    found, at, text = "", 0, line.strip()
    while at < len(text):
        match, pattern = next(((m, p) for kind, p in ALIKE if (m := kind.match(text, at))), (None, ""))
        found += pattern or re.escape(text[at])
        at = match.end() if match else at + 1
    return re.compile(found)


def missing_line(printed: str, expected: tuple[str, ...]) -> str:
    """The first of these lines that was not printed; empty: none. (The order of what comes from stdout and
    from stderr is nobody's promise.)"""
    lines = (line for line in expected if not QUESTION.search(line))
    return next((line for line in lines if not as_pattern(line).search(printed)), "")
