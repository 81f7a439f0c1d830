"""A document that does not do what it says is found, with the line where, and leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import document_runner
import psutil
import pytest
from document_reader import blocks, snippets
from document_runner import Reader, Wrong
from launcher import Launcher

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]
END_S = 30.0


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher(os.environ)
    yield made
    made.kill(END_S)


@pytest.fixture
def reader(tmp_path: Path, launcher: Launcher) -> Reader:
    return Reader(tmp_path, os.environ, launcher, lambda name: f"no-{name.lower()}")


def read(reader: Reader, tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.md"
    path.write_text(text)
    with reader:
        for block in blocks(path, "a.md"):
            reader.read(block)
        for snippet in snippets(path, "a.md", "python"):
            reader.run_program(snippet)


def started(name: str) -> list[psutil.Process]:
    """What runs of that name, and was started here."""
    return [p for p in psutil.Process().children(recursive=True) if name in p.name()]


def left_in(folder: Path) -> list[psutil.Process]:
    """What runs in a folder, also where nobody is left who started it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # somebody else's, or gone in this moment
            if Path(process.cwd()).is_relative_to(folder):
                found.append(process)
    return found


def test_commands_that_do_what_is_said(reader: Reader, tmp_path: Path) -> None:
    """A sample with all that a block may have, also of a process that stays."""
    text = """
```console
$ p2pdiloco status   # status 4: no node runs here
…no node and no bootstrap runs here…
$ make demo
$ mkdir mine && cd mine
$ cd mine
$ p2pdiloco run new anna --preset small \\
    --admission open
wrote run.toml: causal-lm, 1 M parameters…
  p2pdiloco bootstrap --run run.toml
$ export P2PDILOCO_DATA_DIR=boot
$ p2pdiloco bootstrap --run run.toml --listen /ip4/0.0.0.0/tcp/31337
p2pdiloco node --join ADDRESS --run RUN
p2pdiloco node p2pdiloco:1…
$ echo LINK RUN ADDRESS > said
$ p2pdiloco run link RUN --data-dir boot
p2pdiloco:1…
```
<!-- machine: friend -->
```console
$ ls
constraints.txt…
```
<!-- not run: needs a router -->
```console
$ p2pdiloco node --announce /ip4/203.0.113.7/tcp/31337
$ ping 203.0.113.7
```
"""
    read(reader, tmp_path, text)
    work = tmp_path / "here" / "p2pdiloco" / "mine"
    link, run, address = (work / "said").read_text().split()
    assert link.startswith("p2pdiloco:1") and address.startswith("/ip4/127.0.0.1/tcp/") and len(run) == 64
    assert (work / "boot" / "owner.key").exists() and not list((tmp_path / "here" / "home").glob("*"))
    assert not started("p2pd")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("$ p2pdiloco run new anna --presets micro", "a.md:2: there is no --presets"),
        ("$ p2pdiloco run nwe anna", "a.md:2: there is no command nwe"),
        ("$ p2pdiloco status", "a.md:2: ended with 4, not 0\n$ p2pdiloco status"),
        ("$ p2pdiloco --version # status 3", "a.md:2: ended with 0, not 3"),
        ("$ p2pdiloco --version\nversion …\nand more", "a.md:2: did not print: and more"),
        ("$ p2pdiloco bootstrap --run none.toml", "a.md:2: ended with 2\n$ p2pdiloco bootstrap"),
        ("$ p2pdiloco --version | wget -", "a.md:2: wget is not known here"),
        ("$ sudo rm -r /", "a.md:2: sudo is not known here"),
        ("$ rm -r ../..", "a.md:2: ../.. is of the machine that this runs on"),
        ("$ cd nowhere", "a.md:2: there is no folder nowhere"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(reader: Reader, tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(Wrong) as error:
        read(reader, tmp_path, f"```console\n{text}\n```\n")
    assert str(error.value).startswith(said)


def test_flags_of_what_is_not_run_exist_too(reader: Reader, tmp_path: Path) -> None:
    text = "<!-- not run: needs a GPU -->\n```console\n$ p2pdiloco node --nporc 2\n```\n"
    with pytest.raises(Wrong, match=r"a\.md:3: there is no --nporc"):
        read(reader, tmp_path, text)


def test_who_stays_ends_with_a_document_that_is_wrong(reader: Reader, tmp_path: Path) -> None:
    text = """```console
$ p2pdiloco run new anna
$ p2pdiloco bootstrap --run run.toml
$ cat none
```
"""
    with pytest.raises(
        Wrong, match=r"(?s)a\.md:4: ended with 1.*--- p2pdiloco bootstrap --run run\.toml\n.*ready"
    ):
        read(reader, tmp_path, text)
    assert not started("p2pd")


def test_a_command_that_does_not_end_leaves_nothing_of_what_its_shell_started(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_runner, "COMMAND_S", 0.5)
    text = "```console\n$ cat constraints.txt; tail -f constraints.txt | cat\n```\n"
    with pytest.raises(Wrong, match=r"a\.md:2: did not end within 0\.5 s"):
        read(reader, tmp_path, text)
    assert not left_in(tmp_path)


def test_of_who_stays_one_that_has_ended_keeps_no_other_alive(reader: Reader, tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("```console\n$ tail -f constraints.txt\n$ tail -f bootstrap/bootstrap.toml\n```\n")
    with pytest.raises(Wrong, match=r"a\.md:2: ended with -9"), reader:
        for block in blocks(path, "a.md"):
            reader.read(block)
        first = reader._staying[0].process
        first.kill()
        first.wait()
    assert not left_in(tmp_path)


def test_a_program_is_not_run_where_that_is_said(reader: Reader, tmp_path: Path) -> None:
    read(reader, tmp_path, "<!-- not run: needs a GPU -->\n```python\nraise SystemExit(3)\n```\n")
    with pytest.raises(Wrong, match="ended with 3"):
        read(reader, tmp_path, "```python\nraise SystemExit(3)\n```\n")
