"""Checkpoints of the result that a node writes by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from daemon_kit import Neighbourhood, until

from p2pdiloco.config.values import parse_every
from p2pdiloco.daemon.run_files.saved_state import load_result
from p2pdiloco.errors import ConfigError


async def test_a_node_writes_the_result_after_so_many_merges_and_keeps_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "results"
    async with Neighbourhood(tmp_path) as swarm:
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
    async with Neighbourhood(tmp_path) as swarm:
        member = await swarm.member("a", genesis=True, result_dir=tmp_path / "results", result_every="1s")
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
    async with Neighbourhood(tmp_path) as swarm:
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
