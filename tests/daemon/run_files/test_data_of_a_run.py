"""Data of a run that nodes give each other: its tokenizer file, and what of the data is begun."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
from daemon_kit import served_runs
from tokenizers import Tokenizer, models, pre_tokenizers

from p2pdiloco.cli import main as cli_main
from p2pdiloco.config.manifest import DataSection
from p2pdiloco.config.presets import for_run
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon import start, wire
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.member import Approval
from p2pdiloco.daemon.network.discovery import Sharing
from p2pdiloco.daemon.run_files import run as find
from p2pdiloco.daemon.run_files import run as runs
from p2pdiloco.daemon.run_files.run import find_run
from p2pdiloco.daemon.run_files.saved_state import result_of
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
from p2pdiloco_lab.memory_net import MemoryNetwork, MemoryTransport


async def peer(hub: MemoryNetwork, door: FrontDoor | None = None) -> MemoryTransport:
    transport = hub.transport(Identity.generate().peer_id)
    await transport.start(door or FrontDoor())
    return transport


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
    run, vault = runs.sign_run(folder / "bytes.toml", Identity.generate())
    result_of(run, vault, list(runs.genesis_versions(run, vault))).save(folder / "theta")
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
    return start._own_manifest(settings, settings.run_file, Approval(settings, print, None))


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
    data_dir.mkdir()
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
        transport = await peer(hub, door)
        peers.append(transport.peer_id)
        await transport.put_record(wire.RUNS_KEY, wire.encode(wire.RunList((run.summary(),))), 60.0)
    kept_tokenizer(tmp_path / "liar", run.id).write_bytes(b'{"version": "other"}')
    found, _ = await find_run(await peer(hub), Identity.generate(), "r", tmp_path / "me", lambda _: None)
    honest = kept_tokenizer(tmp_path / "honest", run.id)
    assert found.id == run.id
    assert kept_tokenizer(tmp_path / "me", run.id).read_bytes() == honest.read_bytes()
    me = await peer(hub)
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
    transports = [await peer(hub) for _ in learners]
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
    newcomer = Sharing(await peer(hub), "run", new)
    await newcomer.tell()
    await newcomer.look()
    assert new.told == [DataShare("one", 2, b"\x81\x01", readers)]
