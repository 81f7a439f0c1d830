"""README and the guides for volunteers and hosts do what they say: every command is typed, in its order, and
prints what it is said to print. Commands of other guides exist."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from document_reader import Unreadable, blocks, inline, snippets
from document_runner import ROOT, Reader, Wrong
from document_words import unknown_flag
from system_kit import Daemon, Swarm

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]
GUIDES = ROOT / "docs" / "guides"
DOCUMENTS = [ROOT / "README.md", *sorted(GUIDES.glob("*.md"))]
TYPED = [ROOT / "README.md", GUIDES / "volunteer.md", GUIDES / "host.md"]
CHOSEN = [path for path in TYPED if os.environ.get("DOCUMENT", "") in str(path)]
"""For whoever writes one: DOCUMENT=host pytest tests/system/documents."""
READERS = 3


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Library:
    """A run that somebody else has, and who follows links and invites of readers."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.launcher = swarm.launcher()
        self._run: tuple[Daemon, Daemon] | None = None
        self._starting = threading.Lock()

    @contextmanager
    def reader(self, folder: Path, say: Callable[[str], object]) -> Iterator[Reader]:
        """Somebody new. Whoever followed their links leaves with them."""
        friends: list[Daemon] = []
        reader = Reader(
            folder,
            self.swarm.environment,
            self.launcher,
            lambda name: self.give(name, reader, friends),
            say,
        )
        try:
            with reader:
                yield reader
        finally:
            for friend in friends:
                friend.signal(signal.SIGINT)
                self.swarm.until(lambda friend=friend: friend.ended() is not None, "a friend to leave")

    def give(self, placeholder: str, reader: Reader, friends: list[Daemon]) -> str:
        """What stands for a placeholder that nothing has printed."""
        if placeholder == "FOLDER":
            return "folder"
        if placeholder == "PEER":
            friends.append(self._friend(reader))
            return friends[-1].peer_id
        with self._starting:
            bootstrap, _ = self._own_run()
        assert placeholder != "INVITE", "nobody is invited to the run that this test has"
        printed = bootstrap.printed()
        found = re.search(
            r"p2pdiloco node --join (?P<ADDRESS>\S+)(?: --join \S+)? --run (?P<RUN>\S+)\n"
            r"p2pdiloco node (?P<LINK>\S+)",
            printed,
        )
        assert found is not None
        return found[placeholder]

    def _own_run(self) -> tuple[Daemon, Daemon]:
        if self._run is None:
            bootstrap = self.swarm.bootstrap(
                "--run", str(self.swarm.manifest("shakespeare", seats=("first",)))
            )
            self.swarm.until(lambda: "p2pdiloco node p2pdiloco:" in bootstrap.printed(), "its link")
            first = self.swarm.node("first", bootstrap, "--genesis", "--keep-history")
            self._run = bootstrap, first
            self.swarm.training(first)
        return self._run

    def _friend(self, reader: Reader) -> Daemon:
        name = f"friend-{len(self.swarm.all)}"
        invited = reader.values.get("INVITE") or reader.values.get("LINK") or self.give("LINK", reader, [])
        friend = self.swarm.start(name, "node", invited, "--name", "friend", "--min-step-s", "0.05")
        friend.expected_to_live = False  # perhaps it is banned
        self.swarm.until(lambda: friend.inner_step() > 1, "a friend to take part")
        return friend


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    """Finds every process by its environment; none may be left, and no temporary folder."""
    with tempfile.TemporaryDirectory(prefix="d") as short, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", short)
        folder = Path(short) / "library"
        folder.mkdir()
        with Swarm(folder) as swarm:
            yield Library(swarm)
        assert list(Path(short).glob("p2pdiloco*")) == [], "temporary folders are left"


def test_documents_do_what_they_say(library: Library, tmp_path: Path) -> None:
    """Several at a time: readers mostly wait. All that is wrong is said, of each document the first."""

    def read(path: Path) -> list[str]:
        said: list[str] = []
        folder = tmp_path / path.stem
        folder.mkdir()
        with library.reader(folder, said.append) as reader:
            for block in blocks(path, name_of(path)):
                reader.read(block)
            for snippet in snippets(path, name_of(path), "python"):
                reader.run_program(snippet)
        return said

    wrong = []
    with ThreadPoolExecutor(READERS) as pool:
        for reading in [pool.submit(read, path) for path in CHOSEN]:
            try:
                print("\n".join(reading.result()))
            except (Wrong, Unreadable) as error:
                wrong.append(str(error))
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("$ p2pdiloco run new anna --presets micro", "a.md:2: there is no --presets"),
        ("$ p2pdiloco --version # status 3", "a.md:2: ended with 0, not 3"),
        ("$ p2pdiloco --version\nversion …\nand more", "a.md:2: did not print: and more"),
        ("$ p2pdiloco bootstrap --run none.toml", "a.md:2: ended with 2\n$ p2pdiloco bootstrap"),
        ("$ sudo rm -r /", "a.md:2: sudo is not known here"),
    ],
)
def test_a_document_that_is_wrong_is_found(library: Library, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.md"
    path.write_text(f"```console\n{text}\n```\n")
    with pytest.raises(Wrong) as error, library.reader(tmp_path, print) as reader:
        for block in blocks(path, "a.md"):
            reader.read(block)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_of_guides_exist(path: Path) -> None:
    typed = [command for block in blocks(path, name_of(path)) for command in block.commands]
    ours = [c for c in typed if c.text.startswith("p2pdiloco ") and not c.status]
    found = [*inline(path, name_of(path)), *ours]
    assert not {c.where: (c.text, said) for c in found if (said := unknown_flag(c.text))}


def test_extras_that_are_installed_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        name
        for path in DOCUMENTS
        for said in re.findall(r"(?:\.|p2pdiloco)\[([a-z,]+)\]", path.read_text(encoding="utf-8"))
        for name in said.split(",")
    }
    assert named <= extras.keys()
