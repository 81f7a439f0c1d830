"""Deliberate bugs in what is cut to a chain's scale, and where the simulator should miss it."""

from __future__ import annotations

from mutation_kit import Patch, mutation
from p2pdiloco.core import chain, inbox


@mutation("strangers", 4, 5, "in-scale")
def a_chain_counts_whatever_tokens_are_claimed(patch: Patch) -> None:
    patch.set(chain, "COUNTED_UNITS", 1 << 60)
    patch.set(chain, "COUNTED_WEIGHTS", 1 << 60)


@mutation("strangers", 5, 10, "in-scale")
def one_learner_may_be_a_whole_merge(patch: Patch) -> None:
    patch.set(chain, "heaviest_units", lambda learners, config: config.most_units)


@mutation("strangers", 4, 5, "in-scale", "stuck")
def stamps_may_be_at_their_end(patch: Patch) -> None:
    for module in (chain, inbox):
        patch.set(module, "stamp_follows", lambda stamp, mark: True)
