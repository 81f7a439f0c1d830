"""Pages of the protocol: docstrings cite sections that there are; tables and numbers are the code's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from arch_source import LAB, ROOT, docstrings, sources

from p2pdiloco.adapters.net import allowance, framing, kept_streams, places
from p2pdiloco.core.api import messages, types
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.plausible import FULL_TRUST
from p2pdiloco.core.api.reasons import VoteRefusal
from p2pdiloco.core.chain import scale, watermarks
from p2pdiloco.core.contributions import kept, own
from p2pdiloco.core.members import view
from p2pdiloco.core.rounds import inbox
from p2pdiloco.daemon import budgets, outbound, wire
from p2pdiloco.daemon.bulk import pushes_in
from p2pdiloco.daemon.bulk.states import donating
from p2pdiloco.daemon.bulk.updates import fanout, gathering
from p2pdiloco.daemon.finding import presence
from p2pdiloco.tensors.merging import agreement

PAGES = ROOT / "docs/protocol", ROOT / "docs/reference"
CITED = re.compile(r"\bdocs/(?:protocol|reference)/([\w-]+)\.md(?:, sections? (\d+))?")
SECTION = re.compile(r"^## (\d+)\. \S", re.MULTILINE)
OLD = re.compile(r"ARCHITECTURE\.md, |\(ARCHITECTURE\.md\)")
"""Citation of the rules where they were once, under headings without numbers."""
FOLDERS = "p2pdiloco", "lab", "scripts", "tests"


def test_sections_are_numbered_without_a_gap() -> None:
    for path in PAGES[0].glob("*.md"):
        text = path.read_text(encoding="utf-8")
        numbers = [int(number) for number in SECTION.findall(text)]
        assert numbers == list(range(1, text.count("\n## ") + 1)), path.name


@pytest.mark.parametrize("folder", FOLDERS)
def test_cited_pages_and_sections_are_there(folder: str) -> None:
    for path, tree in sources(folder).items():
        for line, text in docstrings(tree):
            at = f"{path.relative_to(ROOT)}:{line}"
            plain = " ".join(text.split())
            assert not OLD.search(plain), f"{at}: cite a page of docs/protocol and its section"
            for found in CITED.finditer(plain):
                name, section = found[0].partition(",")[0], found[2]
                page = ROOT / name
                assert page.is_file(), f"{at}: there is no {name}"
                sections = SECTION.findall(page.read_text(encoding="utf-8"))
                assert section is None or section in sections, f"{at}: no section {section} in {name}"


def test_pages_name_files_that_are_there() -> None:
    gone = {}
    for folder in PAGES:
        for page in folder.glob("*.md"):
            named = re.findall(r"`([\w-]+(?:/[\w-]+)+\.py)`", page.read_text(encoding="utf-8"))
            roots = [ROOT, ROOT / "p2pdiloco", ROOT / "p2pdiloco/core"]
            missing = [name for name in named if not any((root / name).is_file() for root in roots)]
            if missing:
                gone[page.name] = missing
    assert gone == {}


# --- tables and numbers ---

RULE = re.compile(r'(?:Violation|broken|fail)\(\s*(?:f?")([a-z-]+)"')


def page(name: str) -> str:
    """Text of a page under docs/, on one line."""
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def first_cells(name: str) -> set[str]:
    """Names in code style in the first column of a page's tables."""
    lines = (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
    return {
        found
        for line in lines
        if line.startswith("|")
        for found in re.findall(r"`(.+?)`", line.split("|")[1])
    }


def names(union: object) -> set[str]:
    """Names of a union's types."""
    return {kind.__name__ for kind in get_args(union)}


def rules(folder: str) -> set[str]:
    """Rules that the code of a folder of the lab raises a violation of."""
    found: set[str] = set()
    for path in (LAB / folder).rglob("*.py"):
        found.update(RULE.findall(Path(path).read_text(encoding="utf-8")))
    return found


def test_every_message_is_listed() -> None:
    unions = messages.AnyMessage, wire.Query, wire.Push, wire.Pull
    listed = first_cells("reference/wire.md")
    for union in unions:
        assert names(union) <= listed, union


def test_every_refusal_of_a_vote_is_listed() -> None:
    assert {reason.value for reason in VoteRefusal} <= first_cells("protocol/election.md")


def test_every_rule_of_the_simulators_is_listed() -> None:
    found = rules("simulation") | rules("bulk_world") | rules("vectors")
    assert len(found) > 25
    assert found <= first_cells("protocol/simulator.md")


BOUNDS = [
    f"| queued messages to a peer (`daemon/outbound.py`) | {outbound.MAX_QUEUED};",
    f"| messages under way to a peer | {outbound.IN_FLIGHT}, {outbound.TIMEOUT_S:.0f} s each",
    f"| heartbeats to peers without a mark | {view.NEWCOMERS_A_BEAT} at a time",
    f"| known peers | {view.MAX_KNOWN:,} |",
    f"| dials of authors never met | {presence.UNKNOWN_DIALS} in {presence.UNKNOWN_DIALS_S:.0f} s",
    f"| watermarks in a table | {types.MAX_WATERMARKS:,} |",
    f"| offers in an inbox | {inbox.ROOM} · `group.size`",
    f"| contributors of a version | {types.MAX_CONTRIBUTORS:,} |",
    f"| our own contributions that wait | {own.MAX_QUEUE} a fragment",
    f"| {kept.KEPT_MAX} a fragment, then combined; {2 * kept.KEPT_MAX} at most",
    f"{places.OF_MEMBERS} of members, {places.OF_OTHERS} of others; {places.MAX_STREAMS_IN} where there",
    f"{kept_streams.MOST_PER_PEER} to a peer, {kept_streams.MOST} in all, {kept_streams.KEEP_S:.0f} s",
    f"{kept_streams.MOST_IN_PER_PEER} of a peer, {kept_streams.MOST_IN} in all",
    f"{framing.MAX_HEADER_BYTES >> 20} MiB, of strangers {framing.OTHERS_HEADER_BYTES >> 10} KiB",
    f"| payloads that peers push | {pushes_in.SHARE_BYTES >> 20} MiB in memory",
    f"| cut pushes that are kept | {pushes_in.MAX_UNFINISHED}, for {pushes_in.KEEP_S / 60:.0f} minutes",
    f"| {donating.MAX_PINS} pins, {donating.SHARE} of one peer, {donating.LEASE_S:.0f} s",
    f"| updates given out that are remembered | {fanout.MAX_GIVEN}, {fanout.MAX_PEERS} peers each",
    f"| {fanout.MAX_WAITING}, {fanout.MAX_WAITING_PER_PEER} of one peer",
    f"| requests to others for one update | {gathering.MAX_PULLS}, two minutes",
    f"| each update | {budgets.UPDATE_COPIES} times",
    f"| status reports | {budgets.REPORT_BYTES >> 20} MiB in {budgets.LISTING_S / 60:.0f} minutes",
    f"{allowance.PEER_AT_ONCE} at once, {allowance.PEER_PER_S:.0f} a second",
    f"{allowance.OTHERS_AT_ONCE} at once, {allowance.OTHERS_PER_S:.0f} a second",
]


@pytest.mark.parametrize("text", BOUNDS)
def test_bounds_are_those_of_the_code(text: str) -> None:
    assert text in page("reference/bounds.md")


T = Timing()
RULES = [
    ("membership", f"heard within {T.suspect_s:.0f} s (`suspect_s`)"),
    ("membership", f"heard within {T.member_ttl_s:.0f} s (`member_ttl_s`)"),
    ("membership", f"{T.resume_alone_s:.0f} s have passed (`resume_alone_s`)"),
    ("membership", f"after {T.genesis_wait_s:.0f} s (`genesis_wait_s`)"),
    ("election", f"waits {T.stagger_s} s longer (`stagger_s`)"),
    ("election", f"does not stand for {T.election_timeout_s} s (`election_timeout_s`)"),
    ("election", f"Others wait {T.hidden_wait_s:.0f} s longer (`hidden_wait_s`)"),
    ("rounds", "has three seconds (`leave_s`"),
    ("forks", f"must be {T.durable_s:.0f} s old (`durable_s`)"),
    ("trust", f"waits {T.strangers_s / 60:.0f} minutes (`strangers_s`)"),
    ("trust", f"after {watermarks.WATERMARK_VERSIONS:,} versions without one"),
    ("trust", f"*votes* after {watermarks.PROBATION_MERGES} merged versions"),
    ("trust", f"first {watermarks.FOUNDING_VERSIONS} versions, {watermarks.FOUNDING_MERGES} merged versions"),
    ("weights", f"at most {scale.COUNTED_UNITS} units, and at most twice"),
    ("weights", f"cut to {scale.LONGEST:g} reaches (to {scale.FIRST_LONGEST:g} in version 1)"),
    ("weights", f"{agreement.BLOCKS} blocks of {agreement.BLOCK} elements"),
    ("weights", f"next to nothing (1/{FULL_TRUST})"),
    ("weights", f"at most {scale.MOST_TERMS:,} above the parent's"),
]


@pytest.mark.parametrize(("name", "text"), RULES)
def test_numbers_of_rules_are_those_of_the_code(name: str, text: str) -> None:
    assert text in page(f"protocol/{name}.md")
