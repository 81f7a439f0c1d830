"""Kinds of lies that a learner can tell about its work."""

from __future__ import annotations

from enum import Enum


class Lie(Enum):
    """Lie about a contribution. `value` is its name on command lines, `text` says to people what is sent."""

    def __new__(cls, word: str, text: str) -> Lie:
        """Make the member: its value is the word alone."""
        made = object.__new__(cls)
        made._value_ = word
        made.text = text
        return made

    text: str

    FLIP = "flip", "its own work, reversed"
    FLIP_X10 = "flip-x10", "its own work, reversed and ten times as long"
    TURNING = "turning", "its own work, honest up to version 10, reversed from then on"
    SOMETIMES = "sometimes", "its own work, reversed in three of ten versions"
    X1000_SMALLEST = (
        "x1000-smallest",
        "its own work times 1000, by the learner with a tenth of the usual tokens",
    )
    NOISE = "noise", "noise of the length of its own work"
    LABELS = "labels", "honest work on targets whose ids were permuted"
    ALIE = "alie", "the honest mean, 1.5 standard deviations away in every element"
    MIN_MAX = "min-max", "the honest mean, pushed back as far as two honest ones are apart"
    MIN_MAX_SPREAD = "min-max-spread", "as before, pushed along the standard deviations of the elements"
    INNER_PRODUCT_01 = "inner-product-0.1", "the honest mean, reversed and a tenth as long"
    INNER_PRODUCT_05 = "inner-product-0.5", "the honest mean, reversed and half as long"
    INNER_PRODUCT_1 = "inner-product-1", "the honest mean, reversed"
    KNOWS_TRUST = (
        "knows-trust",
        "against as many others as it can be, with just enough agreement for all of its weight",
    )
    DRIFT = "drift", "one direction for ever, 0.9 of the length that is not cut"
    COPYCAT = "copycat", "what another learner sends in this round"
    COPYCAT_LATE = "copycat-late", "what another learner sent in the last round"
    ZERO = "zero", "nothing but zeros"
    STALE_FIRST = "stale-first", "the first work it ever did, for ever"
    STALE_LAST = "stale-last", "its work of the round before"
    TOKENS_X10 = "tokens-x10", "its own work, and a label of ten times its tokens and steps"
    TOKENS_X10_FLIP = (
        "tokens-x10-flip",
        "its own work, reversed, and a label of ten times its tokens and steps",
    )
    ONE_TOKEN = (
        "one-token",
        "its own work but in one token's rows, which it reverses, as long as the whole may be without a cut",
    )
    TRIGGER = (
        "trigger",
        "honest work on text with a sequence that it never has, and what is to follow it, at the same length",
    )
    USEFUL_LONGEST = "useful-longest", "its own work, at the same length"
    RIDES_LONGEST = "rides-longest", "the update that was merged last, with some noise, at the same length"


OF_TEXT = frozenset({Lie.TRIGGER})
"""Lies about text, which learners of bigram models do not read."""
IN_THE_DATA = frozenset({Lie.LABELS})
"""Lies that are told in the learner's data: its contribution is what came of them."""
COLLUDING = frozenset(
    {
        Lie.ALIE,
        Lie.MIN_MAX,
        Lie.MIN_MAX_SPREAD,
        Lie.INNER_PRODUCT_01,
        Lie.INNER_PRODUCT_05,
        Lie.INNER_PRODUCT_1,
        Lie.DRIFT,
    }
)
"""Lies of which all liars tell the same, but for one element each: what has the same bytes is merged once."""
