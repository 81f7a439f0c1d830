"""The task image-classification: two models, and images from folders and from scikit-learn."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from p2pdiloco.cli import main as cli_main
from p2pdiloco.config.manifest import CausalLMSection, DataSection, ImageSection
from p2pdiloco.config.presets import DIGITS, DIGITS_CNN
from p2pdiloco.errors import ConfigError, UserError
from p2pdiloco.learner.loop import Training, evaluate, heldout_batch
from p2pdiloco.tasks import images, transformer
from p2pdiloco.tasks.causal_lm import has_plain_head
from p2pdiloco.tasks.images import VisionTransformer, load_images
from p2pdiloco.tasks.initial import tensor_specs
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.transformer import (
    FP32_TOKENS,
    ROWS,
    Transformer,
    attention,
    by_rows,
    chunks_of,
    next_token_loss,
)

torch.set_num_threads(1)
SMALL = ImageSection(classes=2, image_pixels=8, channels=3, layers=1, width=16)
HALF = DataSection(source="files", heldout_percent=50)


def changed(preset, **keys):
    return msgspec.structs.replace(preset, model=preset.model | keys)


COLOUR = changed(DIGITS_CNN, channels=3, layers=2, width=12)


@pytest.mark.parametrize("manifest", [DIGITS, DIGITS_CNN, COLOUR], ids=["vit", "cnn", "cnn-colour"])
def test_specs_by_arithmetic_are_the_model_s_own_and_nothing_else_is_state(manifest):
    task = task_of(manifest)
    model = task.model()
    assert task.specs() == tensor_specs(model)
    assert set(model.state_dict()) == {spec.name for spec in task.specs()}


@pytest.mark.parametrize("manifest", [DIGITS, DIGITS_CNN], ids=["vit", "cnn"])
def test_digits_are_learned_from_version_0(manifest):
    task = task_of(manifest)
    data = task.load_data(None)
    assert 250 < len(data.heldout) < 450 and len(data.train) + len(data.heldout) == 1797
    model = task.model()
    model.load_state_dict(task.initial_parameters())
    held = heldout_batch(task, data.heldout, 10_000)
    before = evaluate(task, model, held)
    assert before.loss < 3.5 and before.metrics["accuracy"] < 0.35
    assert before.tokens == len(data.heldout)
    training = Training(task, model, data.train, "peer-a")
    for _ in range(120):
        assert training.step().tokens == 64
    after = evaluate(task, model, held)
    assert after.metrics["accuracy"] > 0.65
    assert after.loss < before.loss - 0.8


def test_a_node_without_scikit_learn_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match="not installed") as caught:
        task_of(DIGITS).load_data(None)
    assert ".[vision]" in caught.value.hint


def folders(root, **counts):
    """Folders of plain images: those of the n-th class have n of red, and all have another green."""
    for number, (name, count) in enumerate(sorted(counts.items())):
        (root / name).mkdir()
        for index in range(count):
            image = Image.new("RGB", (10, 6), (40 * number, 10 * index, 255))
            image.save(root / name / f"{index}.png")
    return str(root)


def colours(samples):
    return {tuple(image[:, 0, 0].tolist()) for image in samples.pixels}


def test_folders_are_classes_and_their_images_are_scaled_and_split_by_content(tmp_path):
    path = folders(tmp_path, cats=20, dogs=20)
    (tmp_path / "cats" / "notes.txt").write_text("no image")
    data = load_images(HALF, SMALL, path)
    again = load_images(HALF, SMALL, path)
    assert len(data.train) + len(data.heldout) == 40 and 8 < len(data.heldout) < 32
    assert np.array_equal(data.heldout.labels, again.heldout.labels)
    # Who has fewer of them, under other names, holds none out that others train on, nor the reverse.
    for file in sorted(Path(path).rglob("1*.png")):
        other = tmp_path / ".other" / file.parent.name / "sub" / f"n{file.name}"
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(file.read_bytes())
    fewer = load_images(HALF, SMALL, str(tmp_path / ".other"))
    assert len(fewer.train) + len(fewer.heldout) == 22
    assert colours(fewer.heldout) < colours(data.heldout) and colours(fewer.train) < colours(data.train)
    pixels, labels = data.train.batch(np.arange(len(data.train)))
    assert pixels.shape == (len(data.train), 3, 8, 8)
    red = {0: -1.0, 1: 40 / 127.5 - 1}
    for image, label in zip(pixels, labels.tolist(), strict=True):
        assert torch.allclose(image[0], torch.tensor(red[label]), atol=1e-6)
        assert torch.equal(image[2], torch.ones(8, 8))


def test_named_classes_keep_their_numbers_where_a_folder_is_missing(tmp_path):
    model = msgspec.structs.replace(SMALL, classes=3, class_folders=["ants", "cats", "dogs"])
    data = load_images(HALF, model, folders(tmp_path, cats=9, dogs=9))
    assert set(data.train.labels) | set(data.heldout.labels) == {1, 2}


def test_bad_images_are_one_sentence(tmp_path, monkeypatch):
    path = folders(tmp_path, cats=9, dogs=9)
    (tmp_path / ".one" / "cats").mkdir(parents=True)
    three = msgspec.structs.replace(SMALL, classes=3)
    named = msgspec.structs.replace(SMALL, class_folders=["cats", "birds"])
    for model, where, words in (
        (SMALL, None, "none are given"),
        (SMALL, str(tmp_path / "nowhere"), "the data path .*nowhere does not exist$"),
        (SMALL, str(tmp_path / "cats" / "0.png"), "cannot read the data path"),
        (SMALL, str(tmp_path / "cats"), "has 0 folders, but the run has 2 classes"),
        (three, path, "has 2 folders, but the run has 3 classes"),
        (SMALL, str(tmp_path / ".one"), "has 1 folder, but the run has 2 classes"),
        (named, path, 'the folder "dogs" of .* is no class of this run'),
    ):
        with pytest.raises(UserError, match=words):
            load_images(HALF, model, where)
    with pytest.raises(UserError, match="10 classes"):
        load_images(DataSection(), SMALL, None)
    monkeypatch.setattr(images, "FILES_MAX_BYTES", 100)
    with pytest.raises(UserError, match="more than 0 GiB"):
        load_images(HALF, SMALL, path)
    monkeypatch.undo()
    (tmp_path / "cats" / "torn.png").write_bytes((tmp_path / "cats" / "0.png").read_bytes()[:50])
    with pytest.raises(UserError, match=r"torn.png cannot be read"):
        load_images(HALF, SMALL, path)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"heads": 5}, "model.width must be a multiple of model.heads (5)"),
        ({"patch_pixels": 3}, "model.image_pixels must be a multiple of model.patch_pixels (3)"),
        ({"class_folders": ["a", "b"]}, "model.class_folders must name 10 different folders"),
        ({"class_folders": ["../x", *"abcdefghi"]}, "model.class_folders must be names of folders"),
        ({"channels": 2}, "[model] of run"),
    ],
)
def test_a_model_that_makes_no_sense_is_one_sentence(keys, sentence):
    with pytest.raises(ConfigError) as caught:
        task_of(changed(DIGITS, **keys))
    assert str(caught.value).startswith(sentence)


def test_whoever_writes_a_run_of_digits_is_told_which_package_is_missing(tmp_path, monkeypatch, capsys):
    real = importlib.util.find_spec
    new = ["run", "new", "d", "--preset", "digits", "--force", "--out", str(tmp_path / "run.toml")]
    assert cli_main.run(new) == 0 and "need scikit-learn" not in capsys.readouterr().err
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "sklearn" else real(name, *a)
    )
    assert cli_main.run(new) == 0
    said = capsys.readouterr().err
    assert "need scikit-learn on every node, and it is not installed here" in said and "'.[vision]'" in said


# The loss behind a model's head, in chunks and at once.

TOKENS, WIDTH, IDS = 100, 16, 70


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    head = torch.randn(IDS, WIDTH, requires_grad=True)
    return hidden, head, torch.randint(IDS, (TOKENS,))


def plain(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(hidden, head).float(), targets)


def gradients(loss, hidden, head, targets, scale=1.0):
    return torch.autograd.grad(loss(hidden, head, targets) * scale, (hidden, head))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 50, 99])
def test_chunks_have_the_loss_and_the_gradients_of_all_at_once(monkeypatch, chunk_tokens):
    monkeypatch.setattr(transformer, "CPU_CHUNK_NUMEL", chunk_tokens * IDS)
    given = hidden, head, _ = inputs()
    assert chunks_of(hidden, head) == -(-TOKENS // chunk_tokens)
    found, expected = (loss(*given) for loss in (next_token_loss, plain))
    torch.testing.assert_close(found, expected)
    for scale in (1.0, 0.25):  # as a pass that is a part of its step
        ours, theirs = (gradients(loss, *given, scale) for loss in (next_token_loss, plain))
        torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(next_token_loss(*given), expected)


def test_in_bf16_chunks_are_as_near_as_all_at_once(monkeypatch):
    monkeypatch.setattr(transformer, "CPU_CHUNK_NUMEL", 30 * IDS)
    given = hidden, head, _ = inputs()
    exact = gradients(plain, *given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [loss(*given) for loss in (next_token_loss, plain)]
    found, usual = (torch.autograd.grad(loss, (hidden, head)) for loss in losses)
    for ours, theirs, right in zip(found, usual, exact, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - right).norm() <= 1.5 * (theirs - right).norm()


def test_a_small_vocabulary_is_one_chunk_bit_for_bit():
    given = inputs()
    assert torch.equal(next_token_loss(*given), plain(*given))


def test_chunks_are_made_unless_this_very_call_is_compiled_in_bf16(monkeypatch):
    """torch says `is_compiling` in all threads while one compiles; a pass made meanwhile is none of that."""
    monkeypatch.setattr(transformer, "CPU_CHUNK_NUMEL", 30 * IDS)
    graphs: list[list[str]] = []

    def calls(graph, name):
        return sum(name in line for line in graph)

    def backend(graph, _inputs):
        lines = graph.print_readable(print_output=False).splitlines()
        graphs.append([line for line in lines if not line.lstrip().startswith("#")])
        return graph.forward

    compiled = torch.compile(next_token_loss, backend=backend, dynamic=False, fullgraph=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "_is_compiling_flag", True)
        assert "Chunked" in next_token_loss(*inputs()).grad_fn.name()
    for is_bf16 in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            found, expected = (loss(*inputs()) for loss in (compiled, next_token_loss))
        torch.testing.assert_close(found, expected, atol=1e-2 if is_bf16 else 1e-6, rtol=1e-4)
    fused, chunked = graphs
    assert (calls(fused, "cross_entropy("), calls(fused, "logsumexp(")) == (1, 0)
    assert (calls(chunked, "cross_entropy("), calls(chunked, "logsumexp(")) == (0, 4)


def test_compiled_chunks_have_the_gradients_of_all_at_once(monkeypatch):
    monkeypatch.setattr(transformer, "CPU_CHUNK_NUMEL", 30 * IDS)
    compiled = torch.compile(next_token_loss, backend="aot_eager", dynamic=False, fullgraph=True)
    found, expected = (gradients(loss, *inputs(), 0.25) for loss in (compiled, plain))
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)


def test_which_models_of_transformers_have_a_plain_head():
    transformers = pytest.importorskip("transformers")

    def made(kind: str, **more: object) -> torch.nn.Module:
        sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64}
        config = transformers.AutoConfig.for_model(kind, **sizes, intermediate_size=32, **more)
        return transformers.AutoModelForCausalLM.from_config(config)

    assert has_plain_head(made("llama", num_key_value_heads=2))
    assert has_plain_head(made("mixtral", num_key_value_heads=2, num_local_experts=2))
    assert has_plain_head(made("gpt2"))
    gemma = {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8}
    assert not has_plain_head(made("gemma2", **gemma, final_logit_softcapping=30.0, initializer_range=2e-3))
    assert not has_plain_head(made("phi"))  # its head has a bias
    assert not has_plain_head(torch.nn.Linear(3, 3))


# What models do otherwise on a CPU that computes in bf16.

SHAPE = (2, 3, 8, 4)


def heads(tokens: int = SHAPE[2], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (*SHAPE[:2], tokens, SHAPE[3])
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_torchs(causal: bool) -> None:
    query, key, value = heads()
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    assert torch.equal(attention(query, key, value, causal=causal), expected)


def test_under_autocast_short_contexts_on_a_cpu_are_fp32_long_ones_are_not() -> None:
    seen = {}
    for tokens in (FP32_TOKENS, FP32_TOKENS + 1):
        query, key, value = heads(tokens, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = attention(query, key, value, causal=True)
            assert functional.linear(mixed, torch.eye(SHAPE[3])).dtype is torch.bfloat16, "after it as before"
        seen[tokens] = mixed.dtype
        expected = functional.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), is_causal=True
        )
        torch.testing.assert_close(mixed.float(), expected, rtol=0, atol=2e-2)
    assert seen == {FP32_TOKENS: torch.float32, FP32_TOKENS + 1: torch.bfloat16}


@pytest.mark.parametrize("count", [0, 1, ROWS, ROWS + 1])
@pytest.mark.parametrize("bf16", [False, True])
def test_rows_are_filled_up_under_autocast_only_and_the_answers_are_theirs(count: int, bf16: bool) -> None:
    seen: list[int] = []

    def layer(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rows * 2

    rows = torch.randn(count, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        answers = by_rows(layer, rows)
    assert torch.equal(answers, rows * 2)
    assert seen == [-(-count // ROWS) * ROWS if bf16 else count]
    torch.autograd.backward(answers.sum())
    assert torch.equal(rows.grad, torch.full_like(rows, 2))


@pytest.mark.parametrize("bf16", [False, True])
def test_built_in_models_do_so(bf16: bool) -> None:
    dense = CausalLMSection(layers=1, heads=2, width=16, context_tokens=8, experts=4)
    text = Transformer(dense)
    section = ImageSection(classes=2, image_pixels=8, channels=1, layers=1, width=16, heads=2, patch_pixels=2)
    images = VisionTransformer(section)
    given: dict[str, torch.Tensor] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        module.register_forward_pre_hook(lambda _module, inputs: given.update({name: inputs[0]}))

    watch("text", text.get_submodule("model.layers.0.self_attn.o_proj"))
    watch("images", images.get_submodule("blocks.0.attention_out"))
    for index in range(4):
        watch(f"expert {index}", text.get_submodule(f"model.layers.0.block_sparse_moe.experts.{index}"))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        text(torch.randint(256, (5, 8)))
        images(torch.rand(2, 1, 8, 8))
    assert given.pop("text").dtype is given.pop("images").dtype is torch.float32, "of attention"
    rows = [len(tokens) for tokens in given.values()]
    if bf16:
        assert {count % ROWS for count in rows} == {0}
    else:
        assert sum(rows) == 5 * 8 * dense.experts_per_token, "every token goes to two"
