"""Shapes that no machine has are one sentence, wherever they come in, and before anything is allocated."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from p2pdiloco.adapters.result_file import checksum_of, load_metadata, load_tensors
from p2pdiloco.cli.main import run as main
from p2pdiloco.config.manifest import Manifest, canonical_bytes, sign_manifest, table
from p2pdiloco.config.presets import for_run
from p2pdiloco.daemon.run_files.run import open_run
from p2pdiloco.daemon.run_files.shared_files import initial_beside
from p2pdiloco.errors import ConfigError, RemoteError, StorageError
from p2pdiloco.identity import Identity
from p2pdiloco.tasks.own_tasks import OwnLoopSection
from p2pdiloco.tasks.registry import render_toml, task_of
from p2pdiloco.tensors.layout import plan_fragments
from p2pdiloco.tensors.sizes import TensorSpec

WORDS = "a model must have at most"
ABSURD = [
    "w 999999999999x999999999999",
    "w 0x999999999999x999999999999",
    "w 4294967296x4294967296",
    "w " + "x".join(["999999999999"] * 8),
    "w 3000000000x3000000000 embedding",
]


def manifest(*shapes: str) -> Manifest:
    base = for_run("micro", "absurd")
    run = msgspec.structs.replace(base.run, task="own-loop", initial="0" * 64, initial_name="x")
    return msgspec.structs.replace(base, run=run, model=table(OwnLoopSection(parameters=list(shapes))))


@pytest.mark.parametrize("shape", ABSURD)
def test_absurd_shapes_of_a_manifest(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = manifest("v 8x8", shape)
    with pytest.raises(ConfigError, match=WORDS):
        task_of(found)
    owner = Identity.generate()
    signed = sign_manifest(found, bytes(32), owner, owner.peer_id)
    with pytest.raises(RemoteError, match=WORDS):
        open_run(signed, Identity.generate(), given={})
    assert canonical_bytes(found)
    path = tmp_path / "run.toml"
    path.write_text(render_toml(manifest("v 8x8")).replace('"v 8x8"', json.dumps(shape)))
    initial_beside(path).write_bytes(b"")
    for command in (["run", "check", str(path)], ["plan", str(path)]):
        assert main(command) == 2
        (error, *hint) = capsys.readouterr().err.splitlines()
        assert error.startswith("error: ") and WORDS in error and len(hint) <= 1


HEADERS = {
    "overflow": {"w": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]}},
    "product": {"w": {"dtype": "F32", "shape": [999999999999] * 2, "data_offsets": [0, 0]}},
    "dimension": {"w": {"dtype": "F32", "shape": [1 << 63, 0], "data_offsets": [0, 0]}},
    "none of much": {"w": {"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}},
    "dimensions": {"w": {"dtype": "F32", "shape": [0] * 70, "data_offsets": [0, 0]}},
    "negative": {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}},
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("read", [load_tensors, checksum_of])
def test_absurd_shapes_of_a_file(read: Callable[[Path], object], name: str, tmp_path: Path) -> None:
    text = json.dumps(HEADERS[name]).encode()
    path = tmp_path / "absurd.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(StorageError, match=r"absurd\.safetensors") as refused:
        read(path)
    assert "\n" not in str(refused.value)


def test_a_file_whose_header_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "absurd.safetensors"
    path.write_bytes(struct.pack("<Q", 30) + b'{"__metadata__": {"a": "\xff\xff"}}   ')
    for read in (load_metadata, load_tensors, checksum_of):
        with pytest.raises(StorageError, match="cannot be read as safetensors"):
            read(path)


def test_a_plan_takes_no_memory_for_every_row() -> None:
    """A row of almost everything keeps fragments uneven however finely the rest is cut."""
    specs = [TensorSpec("one", (1, 1 << 39)), TensorSpec("many", (1 << 24, 1))]
    with pytest.raises(ConfigError, match="too uneven to be cut"):
        plan_fragments(specs, 1024)
    finer = [TensorSpec("two", (2, 1 << 38)), TensorSpec("many", (1 << 20, 1 << 18))]
    assert len(plan_fragments(finer, 1000)) == 1000
