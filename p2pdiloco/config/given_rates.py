"""Inner learning rates for models that exist: by number of parameters and by kind of training.

Rates are AdamW's, the highest of a schedule that warms up and falls. Each row names the published recipes
that it follows. They differ by ten and more at one size, as batches, data and aims do. A row has a value from
the lower half of what is published: a rate that is too low costs time, one that is too high costs the model.
Where a size has no recipe of a kind, the value continues its neighbours.
"""

from __future__ import annotations

import math

from msgspec import Struct

FINETUNE, CONTINUE, ADAPTER = "finetune", "continue", "adapter"
KINDS = FINETUNE, CONTINUE, ADAPTER
"""Kinds of training: short, on few data; long further training of all parameters, on many; of added
low-rank matrices only."""
VERBS = {FINETUNE: "fine-tune", CONTINUE: "train on", ADAPTER: "train adapters of"}
TOO_LARGE = 3.0
"""Multiple of a row's rate above which a person is warned."""


class RateRow(Struct, frozen=True):
    """Rates for models of at most so many parameters."""

    most_numel: float
    finetune: float
    continued: float
    adapter: float
    sources: str
    """Recipes that the row follows, shortly, for people."""

    def rate(self, kind: str) -> float:
        """Rate of a kind of training (`KINDS`)."""
        return {FINETUNE: self.finetune, CONTINUE: self.continued, ADAPTER: self.adapter}[kind]


ROWS = (
    RateRow(2e7, 3e-4, 6e-4, 3e-3, "own runs with 0.8 M, docs/results.md"),
    # Fine-tuning: GPT-2 (124 M) for Dutch 2e-5, the same handbook's SmolLM2-135M 1e-3, with a batch of 128.
    # Continuing: GPT-2 for Dutch 2e-4.
    RateRow(2e8, 1e-4, 2e-4, 1e-3, "alignment-handbook: gpt2-nl, smollm2; an own run with 135 M"),
    # Fine-tuning: SmolLM2-360M 1e-3; the default of transformers' Trainer is 5e-5. Continuing: 405 M at 3e-4,
    # its rate of pre-training (2403.08763), after hundreds of billions of tokens.
    RateRow(7e8, 5e-5, 2e-4, 5e-4, "alignment-handbook: smollm2; 2403.08763"),
    # TinyLlama-1.1B-Chat 1e-5, OLMo-2-1B 3e-5, SmolTulu-1.7B 9e-5 (2412.08347), SmolLM2-1.7B 3e-4.
    RateRow(2e9, 3e-5, 1e-4, 3e-4, "OLMo-2-1B, TinyLlama-1.1B-Chat, SmolTulu-1.7B (2412.08347)"),
    RateRow(5e9, 2e-5, 1e-4, 2e-4, "alignment-handbook: smollm3"),
    # Fine-tuning: Alpaca-7B, Vicuna-7B and 13B, Zephyr-7B 2e-5; Tulu-3-8B 5e-6. Continuing: Llama-3.1-8B on
    # The Stack 1e-4 (Fast-LLM's guide), 10 B at 1.2e-4 (2403.08763). Adapters: QLoRA's 7 B and 13 B 2e-4.
    RateRow(1.5e10, 1e-5, 1e-4, 2e-4, "Alpaca, Vicuna, Zephyr, Tulu 3 (2411.15124), QLoRA (2305.14314)"),
    # Tulu-3-70B 2e-6. Continuing: 15 B at 4.5e-5 (2407.07263). Adapters: QLoRA's 33 B and 65 B 1e-4.
    RateRow(math.inf, 2e-6, 4e-5, 1e-4, "Tulu 3 (2411.15124), 2407.07263, QLoRA (2305.14314)"),
)
"""Rows by size, smallest first. Adapters without a recipe of their own have ten times fine-tuning's rate
("LoRA Without Regret", Thinking Machines)."""


def row_for(numel: int) -> RateRow:
    """Row of a model of so many parameters."""
    return next(row for row in ROWS if numel <= row.most_numel)


def too_large(rate: float, numel: int, kind: str) -> str:
    """Warn of a rate that is far above the table's; empty: it is not."""
    usual = row_for(numel).rate(kind)
    if rate <= TOO_LARGE * usual:
        return ""
    return (
        f"a learning rate of {rate:g} is {rate / usual:.2g} times what is usual to {VERBS[kind]} a model of "
        f"this size ({usual:g}): it may lose what it has learned"
    )
