"""The task causal-lm: parameters, version 0, text, and what the model computes."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch.nn import functional

from p2pdiloco.adapters.result_file import checksum_of, load_metadata, load_tensors
from p2pdiloco.cli.main import run as main
from p2pdiloco.config.manifest import (
    CausalLMSection,
    DataSection,
    Manifest,
    canonical_bytes,
    sign_manifest,
    table,
)
from p2pdiloco.config.presets import MICRO, TINY, TINY_MOE, for_run
from p2pdiloco.daemon.run_files.run import open_run
from p2pdiloco.daemon.run_files.shared_files import initial_beside
from p2pdiloco.errors import ConfigError, RemoteError, StorageError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.learner.loop import Training, evaluate, heldout_batch
from p2pdiloco.learner.samples import permuted
from p2pdiloco.tasks import hub_streams as hub
from p2pdiloco.tasks import text, transformer
from p2pdiloco.tasks.documents import hash64, pieces
from p2pdiloco.tasks.hub_streams import load_corpus
from p2pdiloco.tasks.initial import tensor_specs
from p2pdiloco.tasks.own_tasks import GivenSection
from p2pdiloco.tasks.registry import render_toml, task_of
from p2pdiloco.tasks.tokens import ByteTokenizer
from p2pdiloco.tensors.layout import plan_fragments
from p2pdiloco.tensors.sizes import TensorSpec

torch.set_num_threads(1)
GOLDEN = "043ca4a45ff215770e3cd4b670da70a421296489a2c47610ea7b73667441a0d3"


def changed(**keys):
    """MICRO with other keys in its [model]."""
    return msgspec.structs.replace(MICRO, model=MICRO.model | keys)


MOE = changed(experts=4, experts_per_token=2)
SHARED = changed(heads=4, key_value_heads=2, tied_head=False)


@functools.cache
def data():
    return task_of(MICRO).load_data(None)


def digest_of(parameters):
    digest = hashlib.sha256()
    for name, tensor in parameters.items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


# --- version 0 --------------------------------------------------------------------------------------


def test_version_0_has_the_golden_digest_and_another_one_with_another_seed():
    """If this fails, runs that exist can no longer be joined: do not touch the golden digest."""
    assert digest_of(task_of(MICRO).initial_parameters()) == GOLDEN
    other = msgspec.structs.replace(MICRO, run=msgspec.structs.replace(MICRO.run, seed=1))
    assert digest_of(task_of(other).initial_parameters()) != GOLDEN


@pytest.mark.parametrize("manifest", [TINY, TINY_MOE], ids=["dense", "experts"])
def test_version_0_starts_near_chance(manifest):
    task = task_of(manifest)
    model = task.model()
    model.load_state_dict(task.initial_parameters())
    ids = torch.randint(0, 256, (4, 129), generator=torch.Generator().manual_seed(0))
    assert evaluate(task, model, (ids,)).loss == pytest.approx(math.log(256), abs=0.1)
    stds = {name: p.std().item() for name, p in model.named_parameters()}
    into = "block_sparse_moe.experts.3.w2" if manifest is TINY_MOE else "mlp.down_proj"
    assert stds["model.embed_tokens.weight"] == pytest.approx(0.02, rel=0.03)
    assert stds[f"model.layers.0.{into}.weight"] == pytest.approx(0.02 / math.sqrt(8), rel=0.03)


@pytest.mark.parametrize("manifest", [MICRO, TINY, MOE, SHARED], ids=["micro", "tiny", "experts", "shared"])
def test_specs_by_arithmetic_are_the_model_s_own(manifest):
    task = task_of(manifest)
    assert task.specs() == tensor_specs(task.model())


# --- what it computes -------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", [MICRO, MOE, SHARED], ids=["dense", "experts", "shared"])
def test_the_model_sees_no_future_token_and_its_loss_is_that_of_every_next_one(manifest):
    task = task_of(manifest)
    model = task.model()
    ids = torch.arange(64).view(1, 64)
    other = ids.clone()
    other[0, 40:] = 200
    before, after = model(ids)[0], model(other)[0]
    torch.testing.assert_close(before[0, :40], after[0, :40])
    assert not torch.allclose(before[0, 40:], after[0, 40:])
    expected = functional.cross_entropy(before[0, :-1], ids[0, 1:])
    torch.testing.assert_close(task.metrics(model, (ids,))["loss"], expected)


def test_attention_is_llama_s_written_out_by_hand():
    """Rotation by halves, grouped heads in order, scaling, mask: against a loop over heads and positions."""
    section = CausalLMSection(layers=1, heads=4, key_value_heads=2, width=16, context_tokens=8)
    body = task_of(changed(**table(section))).model().model
    attention = body.layers[0].self_attn
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(1))
    found = attention(x, body.get_buffer("cos")[:5], body.get_buffer("sin")[:5])

    def rotated(vector, position):
        out = vector.clone()
        for pair in range(2):
            angle = position * 10_000 ** (-2 * pair / 4)
            a, b = vector[pair], vector[pair + 2]
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    q, k, v = (p(x)[0] for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    rows = []
    for at in range(5):
        heads = []
        for head in range(4):
            own, shared = slice(4 * head, 4 * head + 4), slice(4 * (head // 2), 4 * (head // 2) + 4)
            query = rotated(q[at, own], at)
            scores = torch.stack([query @ rotated(k[j, shared], j) / 2 for j in range(at + 1)])
            heads.append(functional.softmax(scores, dim=0) @ v[: at + 1, shared])
        rows.append(attention.o_proj(torch.cat(heads)))
    torch.testing.assert_close(found[0], torch.stack(rows), rtol=1e-4, atol=1e-5)


def test_experts_are_the_weighted_best_two_written_out_by_hand():
    model = task_of(MOE).model()
    layer = model.model.layers[0].block_sparse_moe
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
    found, balance = layer(x)
    for token in range(6):
        chances = functional.softmax(layer.gate(x[0, token]), dim=0)
        best = chances.argsort(descending=True)[:2]
        expected = sum(chances[e] / chances[best].sum() * layer.experts[e](x[0, token]) for e in best)
        torch.testing.assert_close(found[0, token], expected, rtol=1e-4, atol=1e-6)
    assert 0.5 < balance.item() < 4


@pytest.mark.parametrize("per_token", [1, 2])
def test_experts_in_groups_give_what_they_give_in_turn_and_who_has_no_token_a_gradient_of_0(
    monkeypatch, per_token
):
    layer = task_of(changed(experts=4, experts_per_token=per_token)).model().model.layers[0].block_sparse_moe
    with torch.no_grad():
        layer.gate.weight[3] = 0.0  # with inputs that another one likes, nobody's first choices
        layer.gate.weight[:3] = layer.gate.weight[:3].abs()
    x = torch.rand(1, 40, 32, generator=torch.Generator().manual_seed(1))
    of = {}
    for grouped in (False, True):
        monkeypatch.setattr(transformer, "computes_in_groups", lambda *_, is_so=grouped: is_so)
        layer.zero_grad()
        read = x.clone().requires_grad_()
        mixed, balance = layer(read)
        (mixed.square().sum() + balance).backward()
        of[grouped] = [mixed.detach(), read.grad, *(p.grad for p in layer.parameters())]
    for turn, group in zip(of[False], of[True], strict=True):
        torch.testing.assert_close(group, turn, rtol=1e-4, atol=1e-6)
    assert layer.experts[3].w2.weight.grad.abs().max() == 0


def test_balance_is_1_where_experts_are_used_alike_and_more_where_one_is_used():
    layer = task_of(changed(experts=4, experts_per_token=1)).model().model.layers[0].block_sparse_moe
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[:, :4] = 20 * torch.eye(4)
    for used, balance in ((4, 1.0), (1, 4.0)):
        read = torch.zeros(1, 8, 32)
        read[0, torch.arange(8), torch.arange(8) % used] = 1.0
        assert layer(read)[1].item() == pytest.approx(balance, abs=0.01)


def test_experts_learn_all_have_gradients_and_their_balance_is_told_but_not_in_the_loss():
    task = task_of(MOE)
    model = task.model()
    model.load_state_dict(task.initial_parameters())
    training = Training(task, model, data().train, "peer-a")
    losses = [training.step().loss for _ in range(30)]
    assert losses[-1] < losses[0] - 0.8
    assert all(parameter.grad is not None for parameter in model.parameters())
    found = evaluate(task, model, heldout_batch(task, data().heldout, 512))
    assert 0.9 < found.metrics["balance"] < 4
    ids = data().train.batch(np.arange(2))
    with torch.no_grad():
        plain, total = task.metrics(model, ids), task.loss(model, ids)
    assert float(total) == pytest.approx(float(plain["loss"]) + 0.01 * float(plain["balance"]), abs=1e-6)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"width": 34, "heads": 4}, "model.width must be a multiple of model.heads"),
        ({"width": 30, "heads": 10}, "model.width / model.heads must be even, it is 3"),
        ({"heads": 4, "key_value_heads": 3}, "model.heads must be a multiple of model.key_value_heads (3)"),
        ({"experts": 2, "experts_per_token": 3}, "model.experts_per_token must be at most model.experts (2)"),
        ({"vocabulary": 255}, "model.vocabulary must be at least 256"),
        ({"layers": 0}, "[model] of run"),
        ({"depth": 3}, "[model] of run"),
    ],
)
def test_a_model_that_makes_no_sense_is_one_sentence(keys, sentence):
    with pytest.raises(ConfigError) as caught:
        task_of(changed(**keys))
    assert str(caught.value).startswith(sentence)


def test_a_stream_takes_no_more_memory_than_is_bearable():
    data = DataSection(source="hub", shuffle_samples=1 << 20)
    task_of(msgspec.structs.replace(MICRO, data=data))
    with pytest.raises(ConfigError, match=r"shuffle_samples must be at most 262144 for such a context"):
        task_of(msgspec.structs.replace(changed(context_tokens=256), data=data))


def test_a_table_that_leaves_a_key_out_is_refused():
    """Its default may be another one in another version."""
    short = {key: value for key, value in MICRO.model.items() if key != "rope_base"}
    with pytest.raises(ConfigError, match="every key"):
        task_of(msgspec.structs.replace(MICRO, model=short))


def test_too_many_fragments_is_one_sentence():
    sync = msgspec.structs.replace(MICRO.sync, fragments=1024)
    task_of(msgspec.structs.replace(MICRO, sync=sync))
    small = msgspec.structs.replace(changed(layers=1, width=8, hidden_width=8), sync=sync)
    with pytest.raises(ConfigError, match=r"sync\.fragments must be at most 336 for a model of this shape"):
        task_of(small)


# --- text -------------------------------------------------------------------------------------------


def test_embedded_text_is_there_and_split():
    train, heldout = data().train.text, data().heldout.text
    assert len(train) > 2_000_000
    assert 0.01 < len(heldout) / len(train) < 0.12


@pytest.mark.parametrize("size", [1, 2, 3, 100, 1000, 1025])
def test_a_permutation_is_one(size):
    values = permuted(np.arange(size), size, "key")
    assert sorted(values.tolist()) == list(range(size))
    if size >= 100:
        assert values.tolist() != list(range(size))
        assert values.tolist() != permuted(np.arange(size), size, "other").tolist()


def from_files(path, percent=5, context=64):
    section = DataSection(source="files", heldout_percent=percent)
    return load_corpus(section, path and str(path), context, ByteTokenizer())


def lines_of(data):
    """Lines that are trained on, and that are held out."""
    return [set(side.text.tobytes().splitlines()) for side in (data.train, data.heldout)]


def test_what_is_held_out_is_said_by_content_whatever_it_is_called_and_lies_beside(tmp_path):
    corpus = tmp_path / "data" / "corpus"
    corpus.mkdir(parents=True)
    for file, size in enumerate((*[20] * 60, 200, 200, 9000)):
        lines = (f"{file} {index} {hash64(f'{file}/{index}'):020} ümlaut\n" for index in range(size))
        (corpus / f"f{file:02}.txt").write_text("".join(lines) + f"the end of {file}")
    (corpus / "picture.bin").write_bytes(b"\x89PNG\0\xff" * 100)
    whole = from_files(tmp_path / "data", 5)
    train, held = lines_of(whole)
    assert not train & held and b"PNG" not in whole.train.text.tobytes()
    assert 0.04 < len(whole.heldout.text) / (len(whole.train.text) + len(whole.heldout.text)) < 0.06
    # Nothing is lost, and no line is torn: documents end once, where the file ends.
    written = {line for path in corpus.glob("*.txt") for line in path.read_bytes().splitlines()}
    assert train | held == written and len(train) + len(held) == len(written)
    for files in (["f60.txt"], ["f61.txt", "f60.txt", "f03.txt"], ["f62.txt"]):
        some = tmp_path / files[0] / "other"
        some.mkdir(parents=True)
        for number, name in enumerate(files):
            (some / f"{9 - number}.md").write_bytes((corpus / name).read_bytes())
        part_train, part_held = lines_of(from_files(tmp_path / files[0], 5))
        assert part_held and part_held <= held and part_train <= train
    assert lines_of(from_files(corpus / "f60.txt", 5))[1] <= held
    loaded = from_files(corpus, 20)
    assert lines_of(loaded) == lines_of(from_files(tmp_path / "data", 20))
    (windows,) = heldout_batch(task_of(MICRO), loaded.heldout, 640)
    assert windows.shape == (10, 65)
    assert torch.equal(windows, heldout_batch(task_of(MICRO), loaded.heldout, 640)[0])
    # A file goes on: of what was there before only the last region may change sides.
    with (corpus / "f62.txt").open("a") as file:
        file.write("\n" + "".join(f"{number} more\n" for number in range(20_000)))
    longer_train, longer_held = lines_of(from_files(tmp_path / "data", 5))
    last = {line for line in held if line.startswith(b"62 ") and int(line.split()[1]) > 5000}
    assert held & longer_train <= last < held and held - last <= longer_held


def test_no_more_is_read_than_is_text_and_than_there_may_be(tmp_path, monkeypatch):
    (tmp_path / "good.txt").write_text("text " * 400)
    for name, start in (("video.bin", b"\0"), ("log.txt", b"x" * 70_000)):
        (tmp_path / name).write_bytes(start)
    os.truncate(tmp_path / "video.bin", 1 << 40)
    loaded = from_files(tmp_path)
    assert len(loaded.train.text) + len(loaded.heldout.text) == 72_000 + 2
    os.truncate(tmp_path / "log.txt", 1 << 40)
    with pytest.raises(UserError, match="more than 4 GiB of text"):
        from_files(tmp_path)
    # The bound is on all files together.
    os.truncate(tmp_path / "log.txt", 70_000)
    monkeypatch.setattr(text, "MAX_BYTES", 71_999)
    with pytest.raises(UserError, match="GiB of text"):
        from_files(tmp_path)


def test_file_names_that_are_not_utf_8_are_names_too(tmp_path):
    for number in range(20):
        Path(os.fsdecode(bytes(tmp_path) + b"/\xff%d.txt" % number)).write_text("text " * 120)
    loaded = from_files(tmp_path, 50)
    assert len(loaded.train.text) + len(loaded.heldout.text) == 20 * 601
    assert hub._local_identity(tmp_path) != hub._local_identity(tmp_path.parent)


@pytest.mark.parametrize("percent", [1, 5, 50])
def test_pieces_of_any_text_are_its_share_and_all_of_it_and_cut_between_characters(percent):
    for document in ("ü" * 300_000, "€" * 9_999 + "\n" * 60_000, "\n", "word " * 120_000, "x" * 26_000):
        found = list(pieces(document.encode(), percent))
        assert b"".join(piece.text for piece in found) == document.encode()
        assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]
        assert all(piece.text.decode() for piece in found)
        held = sum(len(piece.text) for piece in found if piece.heldout)
        if len(document) >= 26_000:
            assert 0.7 < held / (len(document.encode()) * percent / 100) < 1.3


def test_bad_data_is_one_sentence(tmp_path):
    for path, content, words in (
        (tmp_path / "nowhere", "", "does not exist"),
        (tmp_path, "", "no text in"),
        (None, "", "none are given"),
        (tmp_path, "too short", "the training text has 10 tokens, the context needs 65"),
        (tmp_path, "too short to hold something out of it " * 2, "too little text to hold out 5 % of it"),
    ):
        (tmp_path / "short").write_text(content)
        with pytest.raises(UserError, match=words):
            from_files(path)


# Shapes that no machine has are one sentence, wherever they come in, and before anything is allocated.

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
    return msgspec.structs.replace(base, run=run, model=table(GivenSection(parameters=list(shapes))))


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


SHAPES = {
    "overflow": [1 << 62, 4],
    "product": [999999999999] * 2,
    "dimension": [1 << 63, 0],
    "none of much": [0, 1 << 62, 1 << 62],
    "dimensions": [0] * 70,
    "negative": [-1],
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("read", [load_tensors, checksum_of])
def test_absurd_shapes_of_a_file(read: Callable[[Path], object], name: str, tmp_path: Path) -> None:
    header = {"w": {"dtype": "F32", "shape": SHAPES[name], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
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
