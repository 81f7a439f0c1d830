"""What a stranger's config of `transformers` costs is bounded by what the manifest lists."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from p2pdiloco.errors import UserError
from p2pdiloco.tasks import causal_lm, hub_models

pytest.importorskip("transformers")
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64, "vocab_size": 256}


def without(seconds: float) -> None:
    """Let the processor compute for so long, in Python."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Parts(torch.nn.Module):
    """What a config may ask for beside its listed parameters."""

    def __init__(self, what: str) -> None:
        super().__init__()
        if what == "modules":
            self.parts = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3_000))
        elif what == "parameters":
            for index in range(3_000):
                self.register_parameter(f"p{index}", torch.nn.Parameter(torch.empty(1)))
        elif what == "buffers":
            self.register_buffer("mask", torch.empty(1 << 30, dtype=torch.bool))
        elif what == "time":
            without(10.0)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("modules", "many more parts"),
        ("parameters", "many more parts"),
        ("buffers", "buffers are larger"),
        ("time", "takes more than 0 s to build"),
    ],
)
def test_what_a_model_needs_beside_its_parameters_is_bounded(
    what: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "time":
        monkeypatch.setattr(hub_models, "LEAST_CPU_S", 0.1)
    before = signal.getsignal(signal.SIGVTALRM)
    with torch.device("meta"):
        with pytest.raises(hub_models.TooMuch, match=words), hub_models.bounded(10, 1000):
            Parts(what)
        with hub_models.bounded(10, 1000):
            Parts("nothing")
        Parts("modules")
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


XLSTM = {
    "model_type": "xlstm",
    "vocab_size": 256,
    "hidden_size": 32,
    "embedding_dim": 32,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "num_blocks": 1,
}

XLM = {"model_type": "xlm", "vocab_size": 256, "emb_dim": 32, "n_layers": 1, "n_heads": 2}


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (XLSTM, {"num_blocks": 1000, "num_hidden_layers": 1000}),
        (GPT2, {"n_layer": 1000}),
        (
            {"model_type": "xlm", "vocab_size": 256, "emb_dim": 32, "n_layers": 1, "n_heads": 2},
            {"n_layers": 1000},
        ),
    ],
    ids=["xlstm", "gpt2", "xlm"],
)
def test_a_config_that_builds_much_more_than_is_listed_ends_early(
    config: dict[str, object], more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from p2pdiloco.tasks.initial import tensor_specs

    expected = tensor_specs(causal_lm._meta(config))
    built: list[object] = []
    monkeypatch.setattr(hub_models, "LEAST_PARTS", 100)
    counting = torch.nn.modules.module.register_module_module_registration_hook(
        lambda *part: built.append(part)
    )
    refusal = pytest.raises(UserError, match=r"cannot build a causal model .*many more parts")
    with counting, refusal:
        causal_lm.built(config | more, expected)
    assert len(built) <= 100 + hub_models.PARTS_PER_PARAMETER * len(expected) + 1
