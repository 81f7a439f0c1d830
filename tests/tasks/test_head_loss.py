"""The loss behind a model's head, in chunks and at once."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch.nn import functional

from p2pdiloco.config.presets import for_run
from p2pdiloco.tasks import transformer
from p2pdiloco.tasks.causal_lm import has_plain_head
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.transformer import chunks_of, next_token_loss

TOKENS, WIDTH, IDS = 100, 16, 70


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    head = torch.randn(IDS, WIDTH, requires_grad=True)
    return hidden, head, torch.randint(IDS, (TOKENS,))


def plain(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(hidden, head).float(), targets)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 50, 99])
def test_chunks_have_the_loss_and_the_gradients_of_all_at_once(monkeypatch, chunk_tokens):
    monkeypatch.setattr(transformer, "CPU_CHUNK_NUMEL", chunk_tokens * IDS)
    hidden, head, targets = inputs()
    assert chunks_of(hidden, head) == -(-TOKENS // chunk_tokens)
    found, expected = (loss(hidden, head, targets) for loss in (next_token_loss, plain))
    torch.testing.assert_close(found, expected)
    for scale in (1.0, 0.25):  # as a pass that is a part of its step
        ours, theirs = (
            torch.autograd.grad(x * scale, (hidden, head), retain_graph=True) for x in (found, expected)
        )
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(next_token_loss(hidden, head, targets), expected)


def test_in_bf16_chunks_are_as_near_as_all_at_once(monkeypatch):
    monkeypatch.setattr(transformer, "CPU_CHUNK_NUMEL", 30 * IDS)
    hidden, head, targets = inputs()
    exact = torch.autograd.grad(plain(hidden, head, targets), (hidden, head))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, usual = (loss(hidden, head, targets) for loss in (next_token_loss, plain))
    for ours, theirs, right in zip(
        torch.autograd.grad(found, (hidden, head)),
        torch.autograd.grad(usual, (hidden, head)),
        exact,
        strict=True,
    ):
        assert ours.dtype == torch.float32
        assert (ours - right).norm() <= 1.5 * (theirs - right).norm()


def test_a_small_vocabulary_is_one_chunk_bit_for_bit():
    hidden, head, targets = inputs()
    assert torch.equal(next_token_loss(hidden, head, targets), plain(hidden, head, targets))


@pytest.mark.parametrize("experts", [0, 4])
def test_a_model_s_step_is_the_same_in_chunks(monkeypatch, experts):
    manifest = for_run("micro", "chunks")
    task = task_of(msgspec.structs.replace(manifest, model=manifest.model | {"experts": experts}))
    model = task.model()
    model.load_state_dict(task.initial_parameters())
    (batch,) = [task.load_data(None).train.batch(torch.arange(4).numpy())]
    losses, gradients = [], []
    for numel in (transformer.CPU_CHUNK_NUMEL, 100 * 256):
        monkeypatch.setattr(transformer, "CPU_CHUNK_NUMEL", numel)
        model.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-7, rtol=1e-4)


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
    found = []
    for loss in (compiled, plain):
        hidden, head, targets = inputs()
        found.append(torch.autograd.grad(loss(hidden, head, targets) * 0.25, (hidden, head)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-5)


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
