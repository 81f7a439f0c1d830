"""Documents are read as people read them, and what nobody would run is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from document_reader import Unreadable, blocks, inline, snippets
from document_words import as_pattern, elsewhere, missing_line, programs, substituted, unknown_flag

SAMPLE = """# A guide

Write a run with `p2pdiloco run new anna`:

```console
$ p2pdiloco run new anna --preset \\
    tiny   # or small
wrote run.toml: … parameters
next …

$ cat run.toml
```

1. On the other machine:

   <!-- machine: friend -->
   ```console
   $ p2pdiloco status  # status 4: no node runs here
   ```

<!-- not run: needs a router -->
```console
$ ping 203.0.113.7
```

```python
print("six")
```
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a.md"
    path.write_text(text)
    return path


def test_blocks_with_file_and_line(tmp_path: Path) -> None:
    path = written(tmp_path, SAMPLE)
    first, second, third = blocks(path, "a.md")
    assert first.where == "a.md:5" and [c.where for c in first.commands] == ["a.md:6", "a.md:11"]
    assert first.commands[0].text == "p2pdiloco run new anna --preset \\\n    tiny   # or small"
    assert first.commands[0].printed == ("wrote run.toml: … parameters", "next …")
    assert first.commands[1].printed == () and first.machine == "here"
    assert second.machine == "friend" and second.where == "a.md:17"
    assert [c.status for c in first.commands + second.commands] == [0, 0, 4]
    assert third.not_run == "needs a router"
    assert [s.text for s in snippets(path, "a.md", "python")] == ['print("six")\n']
    assert [c.text for c in inline(path, "a.md")] == ["p2pdiloco run new anna"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```\n$ p2pdiloco node\n```\n", "a.md:1: a block is fenced, as one of"),
        ("```sh\np2pdiloco node\n```\n", "a.md:1: a block is fenced, as one of"),
        ("text\n\n    p2pdiloco node\n", "a.md:3: a block is fenced, as one of"),
        ("```text\np2pdiloco node\n```\n", "a.md:1: commands stand in a block that is fenced as console"),
        ("```text\nfirst\n$ make\n```\n", "a.md:1: commands stand in a block that is fenced as console"),
        ("```console\np2pdiloco node\n```\n", "a.md:2: a command begins with"),
        ("```console\n\n```\n", "a.md:1: no command is in it"),
        ("```console\n$ p2pdiloco \\\n```\n", "a.md:2: the command goes on, and nothing follows"),
        ("<!-- not run -->\n```console\n$ ls\n```\n", "a.md:1: neither `<!-- not run: why -->`"),
        ("<!-- not run: -->\n```console\n$ ls\n```\n", "a.md:1: neither `<!-- not run: why -->`"),
    ],
)
def test_what_is_no_block_of_commands(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(Unreadable) as error:
        blocks(written(tmp_path, text), "a.md")
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("line", "printed", "fits"),
    [
        ("wrote …", "wrote run.toml: 3 keys", True),
        ("wrote … keys", "wrote run.toml", False),
        ("loss 4.12 at 10:22", "loss 3.9 at 7:01", True),
        ("loss 4.12", "loss ?", False),
        ("node --join ADDRESS --run RUN", "p2pdiloco node --join /ip4/1/tcp/2/p2p/1x --run 5f", True),
        ("node --join ADDRESS", "node --join", False),
        ("a  b", "a b", True),
        ("(test)", "test", False),
        ("anna …aB3dEf 12.5k", "anna  …x4Yz12   9.7", True),
        ("run anna (be26c6a41f07)", "run anna (0123456789ab)", True),
        ("run anna (be26c6a41f07)", "run ben (be26c6a41f07)", False),
        ("3 members, 1.5 MiB of 8.1 GiB", "1 member, 33 kB of 1.1 TiB", True),
        ("node p2pdiloco:1s3ccbj4hol…", "node p2pdiloco:1abc", True),
    ],
)
def test_what_a_line_of_output_is_like(line: str, printed: str, fits: bool) -> None:
    assert bool(as_pattern(line).search(printed)) == fits


def test_lines_of_output_are_all_there() -> None:
    assert missing_line("one\ntwo\nthree\n", ("three", "one")) == ""
    assert missing_line("one\ntwo\n", ("two", "four", "five")) == "four"
    assert missing_line("one\n", ("join run anna? [y/N] y", "one")) == ""


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("p2pdiloco node LINK --name anna", ""),
        ("p2pdiloco node LINK --nmae anna", "there is no --nmae"),
        ("p2pdiloco nod LINK", "there is no command nod"),
        ("p2pdiloco run amend RUN --end", ""),
        ("p2pdiloco run amend RUN --ende", "there is no --ende"),
        ("p2pdiloco node --relay/--no-relay", ""),
        ("p2pdiloco node --web=8080  # --this is a remark", ""),
        ("p2pdiloco --version", ""),
    ],
)
def test_flags_that_no_command_has(text: str, missing: str) -> None:
    assert unknown_flag(text) == missing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("p2pdiloco node  # a | b", ["p2pdiloco"]),
        ("P2PDILOCO_YES=1 p2pdiloco node && cat a | grep 'x; y'", ["p2pdiloco", "cat", "grep"]),
        ("cat a \\\n  b; sudo rm -rf x", ["cat", "sudo"]),
    ],
)
def test_programs_of_a_line(text: str, words: list[str]) -> None:
    assert programs(text) == words


def test_what_is_typed_otherwise() -> None:
    for text, typed in (
        ("bootstrap --listen /ip4/0.0.0.0/tcp/31337", "bootstrap --listen /ip4/127.0.0.1/tcp/0"),
        ("node --web 8080", "node --web p8080"),
        ("node --web=0.0.0.0:8081", "node --web=127.0.0.1:p8081"),
        ("curl http://127.0.0.1:8081/healthz", "curl http://127.0.0.1:p8081/healthz"),
        ("p2pdiloco run new a --preset small", "p2pdiloco run new a --preset micro"),
    ):
        assert substituted(text, lambda port: f"p{port}") == typed
    assert elsewhere("make demo    # some nodes") == "tests/system/test_demo.py"
    assert elsewhere("make install") == ""
