"""Experts of a mixture: one after the other, or, where a device multiplies in groups, all at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2pdiloco.config.manifest import CausalLMSection
from p2pdiloco.tasks.models.cpu_bf16 import by_rows
from p2pdiloco.tasks.models.head_loss import narrowed

AMPERE = 8
"""NVIDIA's first compute capability (major) of which torch multiplies bf16 in groups."""
ALIGNED = 8
"""Elements of bf16, 16 bytes, of which rows of grouped matrices must be a multiple."""


class Expert(nn.Module):
    """SwiGLU under Mixtral's names."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class Experts(nn.Module):
    """Mixture of experts: each token goes through the k that the gate likes best, weighted by its softmax
    over these."""

    def __init__(self, section: CausalLMSection) -> None:
        super().__init__()
        self._chosen = section.experts_per_token
        self._section = section
        self.gate = nn.Linear(section.width, section.experts, bias=False)
        self.experts = nn.ModuleList(
            Expert(section.width, section.feed_forward_width) for _ in range(section.experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, -2)
        read = narrowed(tokens)
        chances = functional.softmax(self.gate(read).float(), dim=-1)
        weights, chosen = chances.topk(self._chosen, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).type_as(tokens)
        grouped = computes_in_groups(self._section, x.device, read.dtype == torch.bfloat16)
        mixed = (self._in_groups if grouped else self._in_turn)(read, chosen, weights)
        shares = functional.one_hot(chosen, len(self.experts)).float().mean(dim=(0, 1))
        return mixed.view_as(x), len(self.experts) * (shares * chances.mean(dim=0)).sum()

    def _in_turn(self, read: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sum of the chosen experts' answers to tokens (n, width), by their weights (n, k)."""
        mixed = torch.zeros_like(read, dtype=weights.dtype)
        # Every expert is asked, also for no token: so all parameters have a gradient at every step.
        for index, expert in enumerate(self.experts):
            rows, choices = torch.where(chosen == index)
            answers = by_rows(expert, read[rows]) * weights[rows, choices, None]
            mixed = mixed.index_add(0, rows, answers.type_as(mixed))
        return mixed

    def _in_groups(self, read: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Multiply in two products, of shapes that do not change: tokens are sorted by expert, and nothing
        waits for the device."""
        order = chosen.flatten().argsort(stable=True)
        counts = functional.one_hot(chosen.flatten(), len(self.experts)).sum(dim=0)
        ends = counts.cumsum(0).to(torch.int32)
        both = functional.grouped_mm(read[order // self._chosen], self._stacked("w1", "w3"), offs=ends)
        gate, up = both.chunk(2, dim=-1)
        answers = functional.grouped_mm(functional.silu(gate) * up, self._stacked("w2"), offs=ends)
        by_token = answers[order.argsort()].view(*chosen.shape, -1)
        return (by_token * weights[..., None]).sum(dim=1)

    def _stacked(self, *names: str) -> Tensor:
        """Stack of all experts' weights of these names: (experts, inputs, outputs)."""
        each = [torch.cat([narrowed(getattr(e, name).weight) for name in names]) for e in self.experts]
        return torch.stack(each).transpose(1, 2)


def computes_in_groups(section: CausalLMSection, device: torch.device, bf16: bool) -> bool:
    """Tell whether this device multiplies such experts' matrices at once, each with its tokens."""
    if device.type != "cuda" or not bf16 or torch.version.hip is not None:
        return False
    if section.width % ALIGNED or section.feed_forward_width % ALIGNED:
        return False
    return hasattr(functional, "grouped_mm") and torch.cuda.get_device_capability(device)[0] >= AMPERE
