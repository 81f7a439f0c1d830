"""Whom nobody answers at a start: who goes on from what is saved, and who made a mistake."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import msgspec
import pytest
import torch
from daemon_kit import Neighbourhood, neighbours, peer_on, served_runs, signed_run, until, version_0
from tokenizers import Tokenizer, models, pre_tokenizers

from p2pdiloco.adapters.run_store import signed_file
from p2pdiloco.cli import main as cli_main
from p2pdiloco.config.manifest import DataSection, save_signed
from p2pdiloco.config.presets import for_run
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.config.values import parse_every
from p2pdiloco.daemon import start, wire
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.member import Approval
from p2pdiloco.daemon.network.discovery import Sharing
from p2pdiloco.daemon.run_files import run as find
from p2pdiloco.daemon.run_files import run as runs
from p2pdiloco.daemon.run_files.known_runs import WaysIn, change_ways, goes_on
from p2pdiloco.daemon.run_files.run import Run, find_run
from p2pdiloco.daemon.run_files.saved_state import load_result
from p2pdiloco.daemon.run_files.shared_files import (
    MAX_GIVEN,
    Giving,
    fetched_tokenizer,
    kept_tokenizer,
    tokenizer_beside,
    tokenizer_from,
)
from p2pdiloco.errors import ConfigError, TransportError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.learner.channel import DataShare, Status
from p2pdiloco.ports import PullSource, Refusal
from p2pdiloco.tasks.registry import load_manifest, render_toml
from p2pdiloco_lab.memory_net import MemoryNetwork

BEFORE, OTHER = (f"/ip4/203.0.113.{n}/tcp/31337/p2p/{Identity.generate().peer_id}" for n in (1, 2))


def saved(folder: Path, name: str) -> Run:
    run = signed_run(folder.parent, name)
    path = signed_file(folder, run.id)
    path.parent.mkdir(parents=True)
    save_signed(path, run.signed)
    return run


def test_who_starts_again_with_the_same_addresses_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    again = NodeSettings(data_dir=folder, join=(BEFORE,))
    change_ways(tmp_path, WaysIn.joined, NodeSettings(join=(BEFORE,)), "ab" * 32)
    assert not goes_on(again), "nothing is saved: the addresses may be wrong"
    run = saved(folder, "anna")
    assert goes_on(again), "an earlier release kept no addresses"
    change_ways(folder, WaysIn.joined, again, run.id)
    assert goes_on(again)
    assert goes_on(NodeSettings(data_dir=folder, join=(BEFORE,), run_file=tmp_path / "run.toml"))
    other = NodeSettings(data_dir=folder, join=(OTHER,))
    assert not goes_on(other), "it may be there for another run"
    assert not goes_on(NodeSettings(data_dir=folder, join=(OTHER,), run="ben"))
    assert not goes_on(NodeSettings(data_dir=folder, join=(BEFORE,), run="ben")), "which is not here"
    for named in (run.id, run.id[:12], "anna"):
        assert goes_on(NodeSettings(data_dir=folder, join=(OTHER,), run=named))


def test_of_several_runs_it_has_to_be_clear_which_is_meant(tmp_path: Path) -> None:
    first, _ = saved(tmp_path / "node", "anna"), saved(tmp_path / "node", "ben")
    assert not goes_on(NodeSettings(data_dir=tmp_path / "node", join=(BEFORE,)))
    assert goes_on(NodeSettings(data_dir=tmp_path / "node", join=(BEFORE,), run=first.id))


# Data of a run that nodes give each other: its tokenizer file, and what of the data is begun.


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A run.toml with a tokenizer, as `run new` writes it."""
    words = {character: n for n, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(words | {"</s>": 300}, []))
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "my tokens.json"))
    arguments = ["--tokenizer", str(tmp_path / "my tokens.json"), "--out", str(tmp_path / "run.toml")]
    assert cli_main.run(["run", "new", "r", "--preset", "micro", *arguments]) == 0
    return tmp_path / "run.toml"


def test_run_new_writes_what_a_tokenizer_asks_for_and_run_check_says_what_is_wrong(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = load_manifest(written)
    assert (manifest.data.tokenizer, manifest.data.end_of_document) == ("my-tokens.json", "</s>")
    assert manifest.model["vocabulary"] == 320, "301 tokens, and what makes it a multiple of 64"
    assert cli_main.run(["run", "check", str(written)]) == 0
    said = capsys.readouterr().out
    assert "tokenizer my-tokens.json" in said and "of the run, adamw, rate 0.003\n" in said
    text = written.read_text()
    for old, new, sentence in (
        ("vocabulary = 320", "vocabulary = 300", "model.vocabulary is 300, but the tokenizer"),
        ('end_of_document = "</s>"', 'end_of_document = "<eos>"', 'no token "<eos>"'),
        ('end_of_document = "</s>"', 'end_of_document = ""', "must be stated with data.tokenizer"),
        (manifest.data.tokenizer_digest, "0" * 64, "this is not the tokenizer of the run"),
        (manifest.data.tokenizer_digest, "0", "data.tokenizer_digest"),
        ('dataset = ""', 'dataset = "a/b"', 'for data.source = "hub"'),
    ):
        assert old in text
        written.write_text(text.replace(old, new))
        assert cli_main.run(["run", "check", str(written)]) == 2
        assert sentence in capsys.readouterr().err
    written.write_text(text)
    tokenizer_beside(written).unlink()
    with pytest.raises(ConfigError, match=r"there is no run\.tokenizer\.json beside it"):
        runs.sign_run(written, Identity.generate())
    assert cli_main.run(["run", "new", "r", "--tokenizer", "nowhere.json", "--out", "x"]) == 2
    assert "there is no tokenizer file nowhere.json" in capsys.readouterr().err


def test_a_tokenizer_with_more_tokens_than_the_given_model_is_refused_before_anything_is_written(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written.parent
    (folder / "bytes.toml").write_text(render_toml(for_run("micro", "bytes")))
    version_0(folder / "bytes.toml").save(folder / "theta")
    gpt2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256}
    (folder / "config.json").write_text(json.dumps(gpt2))
    before = sorted(folder.iterdir())
    for given in ("--from", "theta"), ("--architecture", "config.json"):
        arguments = ["run", "new", "r", "--preset", "micro", given[0], str(folder / given[1])]
        arguments += ["--tokenizer", str(folder / "my tokens.json"), "--out", str(folder / "new.toml")]
        assert cli_main.run(arguments) == 2
        words = "my-tokens.json has 301 tokens, but the model has a vocabulary of 256"
        assert words in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


def own_run(settings: NodeSettings) -> object:
    assert settings.run_file is not None
    return start._own_manifest(
        settings.run_file, settings, Identity.generate().peer_id, Approval(settings, print, None)
    )


def test_a_node_that_must_say_where_its_data_lie_is_told_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = msgspec.structs.replace(for_run("micro", "r"), data=DataSection(source="files"))
    monkeypatch.setattr("p2pdiloco.cli.run_commands.for_run", lambda *_: own)
    file = tmp_path / "run.toml"
    assert cli_main.run(["run", "new", "r", "--out", str(file)]) == 0
    assert "LINK-PRINTED-BY-BOOTSTRAP --data PATH\n" in capsys.readouterr().err
    assert cli_main.run(["run", "check", str(file)]) == 0
    assert "every node says where its own lies: --data PATH" in capsys.readouterr().out
    settings = NodeSettings(data_dir=tmp_path, genesis=True, run_file=file)
    with pytest.raises(UserError, match="each node's own data, and none are given"):
        own_run(settings)
    for fine in ({"data": tmp_path}, {"learner_socket": tmp_path / "socket"}):
        assert own_run(msgspec.structs.replace(settings, **fine)) is not None
    hub = DataSection(source="hub")
    assert hub.is_each_nodes_own and not msgspec.structs.replace(hub, dataset="a/b").is_each_nodes_own


async def test_a_bootstrap_takes_a_tokenizer_that_is_lost_or_damaged_from_beside_run_toml_again(
    tmp_path: Path, written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data_dir = tmp_path / "b"
    (run,) = await served_runs(data_dir, written)
    kept = kept_tokenizer(data_dir, run.id)
    content = kept.read_bytes()
    for damaged in (b"", content[:-1], None):
        kept.unlink() if damaged is None else kept.write_bytes(damaged)
        assert await served_runs(data_dir) == []
        assert "its tokenizer is not here any more" in caplog.text
        caplog.clear()
        assert await served_runs(data_dir, written) == [run] and kept.read_bytes() == content


async def test_a_tokenizer_comes_from_whoever_has_the_true_one(
    tmp_path: Path, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "SEARCH_PAUSE_S", 0.01)
    run, vault = runs.sign_run(written, Identity.generate())
    monkeypatch.setattr(random, "sample", lambda peers, count: list(peers)[:count])
    hub, peers = MemoryNetwork(), []
    for name in ("liar", "honest"):
        runs.save_run(tmp_path / name, run, vault)
        door = FrontDoor()
        door.add_run(run, tmp_path / name)
        transport = await peer_on(hub, door)
        peers.append(transport.peer_id)
        await transport.put_record(wire.RUNS_KEY, wire.encode(wire.RunList((run.summary(),))), 60.0)
    kept_tokenizer(tmp_path / "liar", run.id).write_bytes(b'{"version": "other"}')
    found, _ = await find_run(await peer_on(hub), Identity.generate(), "r", tmp_path / "me", lambda _: None)
    honest = kept_tokenizer(tmp_path / "honest", run.id)
    assert found.id == run.id
    assert kept_tokenizer(tmp_path / "me", run.id).read_bytes() == honest.read_bytes()
    me = await peer_on(hub)
    assert await fetched_tokenizer(me, None, run.id, run.manifest, peers) == honest.read_bytes()
    for asked, reason in ((peers[:1], "wrong-digest"), ([], "nobody lists it")):
        with pytest.raises(TransportError, match=reason):
            await fetched_tokenizer(me, None, run.id, run.manifest, asked)

    giving = Giving()
    sources = [giving.serve(f"peer {i}", lambda: tokenizer_from(honest)) for i in range(MAX_GIVEN)]
    assert all(isinstance(source, PullSource) for source in sources)
    assert isinstance(giving.serve("late", lambda: tokenizer_from(honest)), Refusal)
    sources[0].release()  # type: ignore[union-attr]
    assert isinstance(giving.serve("peer 1", lambda: tokenizer_from(honest)), Refusal), "it has a stream"
    assert isinstance(giving.serve("late", lambda: tokenizer_from(tmp_path / "nothing")), Refusal)
    assert isinstance(giving.serve("late", lambda: tokenizer_from(honest)), PullSource), (
        "nothing is no stream"
    )


class Learner:
    """Learner, as far as `Sharing` sees one."""

    def __init__(self, data: str, epoch: int, taken: bytes) -> None:
        self.status: Status | None = Status(1, 1, 1.0, 0.1, None, 0.1, 0.0)
        self.told: list[DataShare] = []
        self.begun(data, epoch, taken)

    def begun(self, data: str, epoch: int, taken: bytes) -> None:
        share = DataShare(data, epoch, taken)
        self.status = Status(1, 1, 1.0, 0.1, None, 0.1, 0.0, share=share)

    def share_data(self, share: DataShare) -> None:
        self.told.append(share)


async def test_members_tell_what_they_have_begun_and_hear_of_those_with_the_same_data() -> None:
    hub = MemoryNetwork()
    learners = [
        Learner("one", 2, b"\x01\x00"),
        Learner("one", 2, b"\x80\x01"),
        Learner("one", 1, b"\xff\xff"),
        Learner("other", 9, b"\xff\xff"),
    ]
    transports = [await peer_on(hub) for _ in learners]
    sharing = [Sharing(t, "run", learner) for t, learner in zip(transports, learners, strict=True)]
    for one in sharing:
        await one.tell()
    await transports[3].put_record(wire.reading_key("run"), b"garbage", 60.0)
    for one in sharing[:3]:
        await one.look()
    readers = tuple(sorted(t.peer_id for t in transports[:3]))
    assert [learner.told for learner in learners[:3]] == [[DataShare("one", 2, b"\x81\x01", readers)]] * 3
    # Nothing new is not told again; a newcomer that does not read yet hears what most read.
    await sharing[0].look()
    assert len(learners[0].told) == 1
    new = Learner("", 0, b"")
    new.status = None
    newcomer = Sharing(await peer_on(hub), "run", new)
    await newcomer.tell()
    await newcomer.look()
    assert new.told == [DataShare("one", 2, b"\x81\x01", readers)]


# Checkpoints of the result that a node writes by itself.


async def test_a_node_writes_the_result_after_so_many_merges_and_keeps_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "results"
    async with Neighbourhood(tmp_path, seats=("a",)) as swarm:
        member = await swarm.member(
            "a", genesis=True, result_dir=folder, result_every="1merges", result_keep=2
        )
        name = f"test-{swarm.run.id[:8]}"
        folder.mkdir(parents=True)
        folder.chmod(0o750)
        for other in (f"{name}-900000000.safetensors", "test-01234567-900000001.safetensors"):
            (folder / other).write_bytes(b"of a state that was lost, or of another run of that name")
        for count in range(1, 5):
            await swarm.round(member, fragment=count % 2)
            await until(lambda n=count: (folder / f"{name}-{n:09d}.safetensors").exists(), f"result {count}")
        await until(lambda: len(list(folder.iterdir())) == 3, "the older ones go")
        assert (folder / "test-01234567-900000001.safetensors").exists(), "not ours"
        mode = (folder / f"{name}-000000004.safetensors").stat().st_mode & 0o777
        assert mode == 0o640, "for whom the folder is for"
        newest = load_result(folder / f"{name}-000000004.safetensors")
        assert [label.number for label in newest.labels] == [2, 2, 0, 0]
        assert [label.digest for label in newest.labels] == [
            member.head(fragment).digest.hex() for fragment in range(4)
        ]
        vault = member.compute.vault
        assert not torch.equal(vault.result(0), vault.theta(0)), "there is momentum to take away"
        theirs = torch.cat([vault.result(f.index) for f in vault.layouts]).sort().values
        assert torch.equal(torch.cat([v.flatten() for v in newest.parameters.values()]).sort().values, theirs)
        # A folder that cannot be written costs the result, not the node.
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        folder.write_text("a file")
        await swarm.round(member)
        await until(
            lambda: any("result not saved" in x["reason"] for x in member.records("checkpoint")), "it is said"
        )
        folder.unlink()
        await swarm.end(member, orderly=True)
        assert [path.name for path in folder.iterdir()] == [f"{name}-000000005.safetensors"]


async def test_a_result_by_time_is_written_only_when_something_was_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pdiloco.daemon.run_files.saved_state.parse_every", lambda *_: (0.01, 0))
    wanted = {"result_dir": tmp_path / "results", "result_every": "1s"}
    async with neighbours(tmp_path, "a", **wanted) as (swarm, member):
        name = f"test-{swarm.run.id[:8]}"
        for count in (1, 2):
            await swarm.round(member)
            await until(
                lambda n=count: (tmp_path / "results" / f"{name}-{n:09d}.safetensors").exists(),
                f"result {count}",
            )
        said = [x["reason"] for x in member.records("checkpoint") if "result saved" in x["reason"]]
        assert [words for words in said if "-000000001" in words] == [
            f"result saved as {name}-000000001.safetensors"
        ]
        # What a full disk, or here a file in the folder's place, kept from being written comes when it can.
        folder, aside = tmp_path / "results", tmp_path / "aside"
        folder.rename(aside)
        folder.write_text("a file")
        await swarm.round(member)
        await until(lambda: "result not saved" in str(member.records("checkpoint")), "it is said")
        folder.unlink()
        await until(lambda: (folder / f"{name}-000000003.safetensors").exists(), "nothing was merged since")


async def test_who_leaves_in_good_order_writes_what_no_result_has_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "results"
    wanted = {"genesis": True, "result_dir": folder, "result_every": "1h"}
    async with Neighbourhood(tmp_path, seats=("a",)) as swarm:
        name = f"test-{swarm.run.id[:8]}"
        member = await swarm.member("a", **wanted)
        await swarm.round(member)
        await swarm.end(member, orderly=True)
        assert [path.name for path in folder.iterdir()] == [f"{name}-000000001.safetensors"]
        assert [label.number for label in load_result(next(folder.iterdir())).labels] == [1, 0, 0, 0]
        member = await swarm.member("a", **wanted)
        await swarm.end(member, orderly=True)
        assert len(list(folder.iterdir())) == 1, "nothing was merged since"
        member = await swarm.member("a", **wanted)
        await swarm.round(member)
        life = swarm.lives[member]
        monkeypatch.setattr(life._results, "save", asyncio.Event().wait)  # a disk that does not answer
        life._save_s = 0.2
        await swarm.end(member, orderly=True)
        said = [x["reason"] for x in member.records("checkpoint")]
        assert any("result not saved: not within" in words for words in said)


@pytest.mark.parametrize("text", ["", "0s", "5", "5days", "-1h", "1.5h"])
def test_what_is_no_interval_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match="--result-every must be a time or a number of merges"):
        parse_every(text, "--result-every")


def test_an_interval_is_a_time_or_a_number_of_merges() -> None:
    assert parse_every("90min", "") == (5400.0, 0) and parse_every("500merges", "") == (0.0, 500)
