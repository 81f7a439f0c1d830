"""`p2pdiloco credits` among members: sums, counting with signatures, keepers that lie, certificates."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from asking_kit import asked, id_of, quick_keepers, settled
from daemon_kit import FORGETFUL, neighbours, signed_run
from msgspec.structs import replace
from rich.console import Console

from p2pdiloco.cli import credits_report
from p2pdiloco.cli import main as cli_main
from p2pdiloco.cli.credits_report import RunCredits
from p2pdiloco.cli.owner_notice import reach_members
from p2pdiloco.config.manifest import sign_manifest
from p2pdiloco.credits import CreditRow, Credits, is_proven, read_certificate, signed_certificate, text_of
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.wire import CreditLine, CreditsAnswer
from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity, verify
from p2pdiloco.release import WIRE_VERSION


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_keepers(monkeypatch)


async def test_sums_of_keepers_and_what_is_counted_here_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with neighbours(tmp_path, "one", "two", keep_history=True) as (hood, one, two):
        await hood.round(one, two)
        await hood.round(one, two, fragment=1)
        tokens, visitor = await settled(one), await hood.rogue()
        told = await asked(monkeypatch, visitor, one, two)
        assert told.keepers == [id_of(one)] and told.checked is None and not told.counted_here
        found = await asked(monkeypatch, visitor, two, one, verify=True)
        assert found.credits.rows == told.credits.rows and not found.notes
        assert sum(row.fragment_tokens for row in found.credits.rows) == tokens
        assert found.checked == sum(row.contributions for row in found.credits.rows) + sum(
            fragment.chain.head.number for fragment in one.core.fragments
        )
        days = await asked(monkeypatch, visitor, one, two, bucket_s=86_400, history=tmp_path / "kept")
        assert sum(row.fragment_tokens for row in days.credits.rows) == tokens
        assert all(row.begins_s for row in days.credits.rows) and [*(tmp_path / "kept").rglob("history.db")]
        kept = await asked(monkeypatch, visitor, one, two, history=tmp_path / "more")
        assert kept.counted_here and kept.credits.rows == told.credits.rows
        # The output, in its three forms.
        lines = list(csv.DictReader(io.StringIO(credits_report.as_csv(found))))
        assert {line["peer"]: int(line["fragment_tokens"]) for line in lines} == {
            row.peer: row.fragment_tokens for row in found.credits.rows
        }
        report = json.loads(credits_report.as_json(found))
        assert report["signatures_checked"] == found.checked and report["missing_before"] == {}
        console = Console(record=True, width=100, file=io.StringIO())
        console.print(credits_report.render(found, 1, False))
        text = console.export_text()
        console = Console(record=True, width=80, file=io.StringIO())
        console.print(credits_report.render(days, 1, True))
        assert "…" not in console.export_text().replace(" …", ""), "nothing is cut at 80 columns"
        assert "1 more: --top 2" in text and "signatures of learners and syncers checked" in text


async def test_of_a_run_that_nobody_keeps_the_newest_versions_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with neighbours(tmp_path, "one", "two", group=FORGETFUL) as (hood, one, two):
        for _ in range(6):
            await hood.round(one, two)
        found = await asked(monkeypatch, await hood.rogue(), one, two)
        assert not found.keepers and found.credits.missing[0] > 1
        rest = sum(row.fragment_tokens for row in found.credits.rows)
        assert rest and rest + found.credits.before_fragment_tokens == found.credits.fragment_tokens
        words = " ".join(line for line, _ in credits_report.caveats(found))
        assert "No member that answers keeps the history" in words and "are missing" in words


def collected(names: dict[str, str], manifest: Any = None) -> RunCredits:
    rows = tuple(
        CreditRow(peer, 4000 - n, 1000 - n, 1000, 10, 8, 1_800_000_000, 1_800_086_400)
        for n, peer in enumerate(names)
    )
    credits = Credits(rows, 4, sum(row.fragment_tokens for row in rows), 0, 0)
    return RunCredits(
        run="ab" * 32, run_name="test", manifest=manifest, credits=credits, names=names, keepers=[],
        members=1, checked=9, counted_here=True,
    )  # fmt: skip


def test_who_has_seen_more_versions_does_not_disagree() -> None:
    rows = tuple(CreditLine(peer, "", 40, 40, 4, 1, 0, 0) for peer in ("p1", "p2"))
    early = CreditsAnswer(1, 80, 0, 0, 2, (), (), bytes(32), rows)
    more = (replace(rows[0], fragment_tokens=80), rows[1])
    later = replace(early, fragment_tokens=120, tips=b"x" * 32, rows=more)
    assert not credits_report._disagreement(early, later) and not credits_report._disagreement(later, early)
    assert credits_report._disagreement(replace(later, rows=rows), replace(later, tips=bytes(32)))


def test_names_are_no_formulas_of_a_spreadsheet() -> None:
    names = {"12D3KooA": "=1+1", "12D3KooB": "@x", "12D3KooC": 'a,"b"\n', "12D3KooD": "-2", "12D3KooE": "Ada"}
    lines = list(csv.DictReader(io.StringIO(credits_report.as_csv(collected(names)))))
    assert [line["name"] for line in lines] == ["'=1+1", "'@x", 'a,"b"·', "'-2", "Ada"]
    assert lines[0]["first"] == "2027-01-15T08:00Z"


def test_a_certificate_is_checked_and_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, folder, volunteer = signed_run(tmp_path), tmp_path / "keeper", tmp_path / "ada"
    key = Identity.load_or_create(folder / "identity.key")
    ada = Identity.load_or_create(volunteer / "identity.key")
    found = collected({ada.peer_id: "ada", key.peer_id: "host"}, run.signed)
    out = tmp_path / "ada.json"
    credits_report.certify(found, "ada", out, volunteer)
    assert cli_main.run(["credits", "--check", str(out)]) == 0
    told = capsys.readouterr()
    assert "by that peer itself: nobody else vouches" in told.out and "by that peer itself" in told.err
    with pytest.raises(UserError, match="exists already"):
        credits_report.certify(found, "ada", out, folder)
    out.unlink()
    credits_report.certify(found, "ada", out, folder)
    assert cli_main.run(["credits", "--check", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"peer {ada.peer_id} (ada) has 1k tokens (1000)" in said and key.peer_id in said
    assert str(found.credits.rows[0].first_s) not in out.read_text(), (
        "times are the word of who gave the history, which nobody signed"
    )
    word = "the word of somebody who wants to know"
    assert cli_main.run(["credits", "--check", str(out), "--prove", word, "--data-dir", str(volunteer)]) == 0
    proof = capsys.readouterr().out.strip()
    line = ["credits", "--check", str(out), "--word", word, "--proof", proof]
    assert cli_main.run(line) == 0 and "has the key of the peer" in capsys.readouterr().out
    assert cli_main.run([*line[:4], "another word", *line[5:]]) == 1
    assert cli_main.run(["credits", "--check", str(out), "--prove", word, "--data-dir", str(folder)]) == 2
    assert "the certificate is of peer" in capsys.readouterr().err
    # Changed, or signed in the owner's name by another.
    true = read_certificate(out.read_bytes())
    assert is_proven(true, word, proof, verify) and not is_proven(
        replace(true, tokens=1), word, proof, verify
    )
    out.write_text(out.read_text().replace('"tokens": 1000', '"tokens": 1001'))
    assert cli_main.run(["credits", "--check", str(out), "--prove", word, "--data-dir", str(volunteer)]) == 2
    assert "did not sign it" in capsys.readouterr().err
    assert cli_main.run(["credits", "--check", str(out)]) == 1
    assert "did not sign this" in capsys.readouterr().out
    out.unlink()
    credits_report.certify(found, "ada", out, folder)
    forged = replace(
        read_certificate(out.read_bytes()),
        role="owner",
        manifest=credits_report.encode_signed(run.signed).hex(),
    )
    out.write_text(text_of(signed_certificate(forged, key)))
    assert cli_main.run(["credits", "--check", str(out)]) == 1
    assert "the run's owner signed it, and that is not so" in capsys.readouterr().out
    odd = replace(read_certificate(out.read_bytes()), signature="abc")
    for content in ("{}", "", "[" * 9999, text_of(odd)):
        out.write_text(content)
        assert cli_main.run(["credits", "--check", str(out)]) == 2
        assert "no certificate of credits" in capsys.readouterr().err


def test_an_owners_certificate_proves_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owner, ada = Identity.load_or_create(tmp_path / "o" / "owner.key"), Identity.generate()
    run = signed_run(tmp_path)
    signed = sign_manifest(run.manifest, run.signed.genesis_digest, owner, owner.peer_id)
    found = collected({ada.peer_id: "ada"}, signed)
    found.run = credits_report.run_id(signed)
    credits_report.certify(found, ada.peer_id[-8:], tmp_path / "c.json", tmp_path / "o")
    assert cli_main.run(["credits", "--check", str(tmp_path / "c.json")]) == 0
    assert f"by the run's owner {owner.peer_id}" in capsys.readouterr().out
    known, other = found.credits, tmp_path / "d.json"
    found.credits = replace(known, missing={0: 7, 2: 9})
    credits_report.certify(found, "ada", other, tmp_path / "o")
    assert "counted from version 9 on" in credits_report.certificate_text(
        credits_report.load_certificate(other)
    )
    # The owner of this run is none of another, and who has its manifest is not its owner.
    honest = credits_report.load_certificate(other)
    for forged, key in ((replace(honest, run="cd" * 32), owner), (honest, ada)):
        other.write_text(text_of(signed_certificate(forged, key)))
        assert cli_main.run(["credits", "--check", str(other)]) == 1
    other.unlink()
    for found.is_disputed, found.credits in ((True, known), (False, replace(known, doubts={"odd": 1}))):
        with pytest.raises(UserError, match="nothing is certified of a history with doubts"):
            credits_report.certify(found, "ada", other, tmp_path / "o")
    found.is_disputed, found.credits = False, known
    found.names["12D3KooWthatEndsInada"] = "bob"  # ids that end so are found in a moment: they are no name
    rows = tuple(replace(row, peer="12D3KooWthatEndsInada") for row in found.credits.rows)
    found.credits = replace(found.credits, rows=rows)
    for word in ("nobody", "ada"):
        with pytest.raises(UserError, match="nobody is called"):
            credits_report.certify(found, word, tmp_path / "d.json", tmp_path / "o")


@pytest.mark.parametrize(
    "line",
    [
        ["--prove", "x"],
        ["--certificate", "c.json"],
        ["--peer", "ada"],
        ["--check", "none.json", "--word", "x"],
        ["--check", "none.json"],
    ],
)
def test_flags_that_do_not_fit_are_a_sentence(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.run(["credits", *line]) == 2
    assert capsys.readouterr().err.startswith("error: ")


async def test_of_many_members_those_that_keep_the_history_are_asked(tmp_path: Path) -> None:
    """Anybody may say so in its record: a few places are kept for them, no more."""
    record = wire.Presence(WIRE_VERSION, 7, "", ("/ip4/127.0.0.1/tcp/1",))

    class Crowd:
        def __init__(self, says: int) -> None:
            self.says = says

        async def get_records(self, _key: str) -> dict[str, bytes]:
            keeps = [index >= 100 - self.says for index in range(100)]
            return {f"p{i}": wire.encode(replace(record, keeps_history=k)) for i, k in enumerate(keeps)}

        async def connect(self, peer: str, addresses: object) -> None:
            pass

    crowd: Any = Crowd(1)
    assert "p99" in (await reach_members(crowd, "run", ())).peers
    crowd = Crowd(50)
    peers = (await reach_members(crowd, "run", ())).peers
    assert "p50" in peers and sum(int(peer[1:]) < 50 for peer in peers) >= 10


async def test_a_keepers_record_says_so(tmp_path: Path) -> None:
    async with neighbours(tmp_path, keep_history=True) as (hood, one):
        other = (await hood.rogue()).transport
        found = await other.get_records(wire.members_key(hood.run.id))
        assert wire.decode(found[id_of(one)], wire.Presence).keeps_history
