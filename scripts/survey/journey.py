"""One architecture's way through a run: from a folder into version 0, a merge, an export, and back."""

from __future__ import annotations

import contextlib
import hashlib
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from p2pdiloco.cli.group import cli
from p2pdiloco.daemon.run_files.run import genesis_versions, sign_run
from p2pdiloco.daemon.run_files.saved_state import RunResult, result_of
from p2pdiloco.errors import UserError, first_line
from p2pdiloco.identity import Identity
from survey.tiny import VOCABULARY, tiny

EQUAL, REFUSED, WRONG = "equal", "refused", "wrong"
SHARE = 1e-4
"""Largest difference of a logit, as a share of the largest logit: what another order of sums makes."""
FACTORY: Any = AutoModelForCausalLM


class Outcome(Struct, frozen=True):
    """Outcome of a journey: `EQUAL`, `REFUSED` with a sentence, or `WRONG` with what is."""

    kind: str
    verdict: str
    words: str = ""
    task: str = ""
    parameters: int = 0
    constants: int = 0
    seconds: float = 0.0


def outcome(kind: str) -> Outcome:
    """Send a tiny model of this `model_type`, with random weights and buffers, through a run."""
    begun = time.monotonic()
    torch.manual_seed(int.from_bytes(hashlib.sha256(kind.encode()).digest()[:4], "big"))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = _saved(kind, folder / "given")
        given = ["--architecture", str(folder / "given" / "config.json")]
        if model is not None:
            given = ["--from", str(folder / "given")]
        toml = folder / "run.toml"
        try:
            _run("run", "new", "survey", "--preset", "micro", *given, "--out", str(toml))
            first, result = _versions(toml)
            result.save(folder / "theta.safetensors")
            theta, out = str(folder / "theta.safetensors"), str(folder / "out")
            _run("export", "--checkpoint", theta, "--dtype", "fp32", "--out", out)
        except UserError as error:
            return Outcome(kind, REFUSED, str(error), seconds=time.monotonic() - begun)
        words = "it was taken, and cannot be built"
        if model is not None:
            words = _loss_of_version_0(model, first) or _difference(model, result, folder)
        return Outcome(
            kind,
            WRONG if words else EQUAL,
            words,
            result.manifest.run.task,
            sum(value.numel() for value in result.parameters.values()),
            len(result.constants),
            time.monotonic() - begun,
        )


def _run(*arguments: str) -> None:
    """Run a command of p2pdiloco, silently. Raises: UserError."""
    nowhere = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        cli.main(arguments, standalone_mode=False)


def _saved(kind: str, folder: Path) -> nn.Module | None:
    """Save a model with random weights and buffers as `transformers` does; None: the library itself builds
    none, and the folder has its config only."""
    config = tiny(kind)
    config.save_pretrained(folder)
    try:
        model: nn.Module = FACTORY.from_config(config, dtype=torch.float32).eval()
    except Exception:  # noqa: BLE001 (whatever an architecture thinks of its config)
        return None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for value in _persistent(model).values():
            _shake(value)
    saved: Any = model
    saved.save_pretrained(folder)
    return model


def _shake(value: Tensor) -> None:
    """Change a buffer at random. What is zero in some places only is a mask, and stays so."""
    if not value.is_floating_point():
        if value.dtype == torch.int64 and value.dim() and not value.any():  # an index
            value.random_(0, 2)
    elif value.any():
        value.mul_(1 + 0.3 * torch.rand_like(value))
    else:
        value.add_(torch.randn_like(value))


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in model.state_dict().items() if name not in names}


def _versions(toml: Path) -> tuple[RunResult, RunResult]:
    """Sign the run; its version 0, and what one contribution, merged into each fragment, makes of it."""
    run, vault = sign_run(toml, Identity.generate())
    versions = list(genesis_versions(run, vault))  # (the file's labels are not what is looked at)
    first = result_of(run, vault, versions)
    for layout in run.layouts:
        base = vault.theta(layout.index)
        payload = vault.own.encode(layout.index, base, base + 0.01 * torch.randn_like(base)).payload
        merged = vault.merge(layout.index, 1, [(payload, 64, 24)])
        vault.commit(layout.index, 1, merged.state_digest)
    return first, result_of(run, vault, versions)


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    ids = torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    model.eval()
    if not isinstance(model, PreTrainedModel):  # causal-lm's own
        own: Tensor = model(ids)[0]
        return own
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _share(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _loss_of_version_0(model: nn.Module, first: RunResult) -> str:
    """Say in what version 0 differs from the given model; empty: in nothing."""
    share = _share(_logits(first.model(torch.device("cpu"))), _logits(model))
    return "" if share <= SHARE else f"logits of version 0 differ by {share:.2g} of the largest"


@torch.no_grad()
def _difference(model: nn.Module, result: RunResult, folder: Path) -> str:
    """Say in what an export differs from the given model with the result's parameters; empty: in nothing."""
    own = dict(model.named_parameters())
    if own.keys() == result.parameters.keys():
        for name, value in result.parameters.items():
            if torch.equal(own[name], value):
                return f"the parameter {name} was not merged"
            own[name].copy_(value)
    elif result.manifest.run.task == "causal-lm":  # (transformers calls them otherwise than its files do)
        model = result.model(torch.device("cpu"))
    else:
        return f"other parameters, the first is {min(own.keys() ^ result.parameters.keys())}"
    try:
        found, report = FACTORY.from_pretrained(folder / "out", dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # noqa: BLE001 (whatever an architecture thinks of its export)
        return f"its export does not load: {first_line(error)}"
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report[what]:
            return f"{what.replace('_', ' ')} in its export: {min(map(str, report[what]))}"
    share = _share(_logits(found), _logits(model))
    return "" if share <= SHARE else f"logits of its export differ by {share:.2g} of the largest"
