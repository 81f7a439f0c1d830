"""Flags of `run new` about how a model is trained, and which of them contradict each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from msgspec import Struct

from p2pdiloco.cli.options import Number
from p2pdiloco.config.presets import CONTINUE, FINETUNE, LENGTHS
from p2pdiloco.errors import UserError

Command = TypeVar("Command", bound=Callable[..., Any])
MOST_EPOCHS = 1000
LEAST_CONTEXT, MOST_CONTEXT = 8, 131_072
"""Bounds of `[model] context_tokens`."""
GIVEN = ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT
_OPTIONS = (
    click.option(
        "--finetune", is_flag=True, help="With --from: a short run on few data. [default with --from]"
    ),
    click.option("--continue", "continued", is_flag=True, help="With --from: long further training."),
    click.option(
        "--learning-rate",
        type=Number(0, 1, min_open=True),
        help="Inner learning rate; with --from the default follows from the model's size.",
    ),
    click.option(
        "--context",
        type=click.IntRange(LEAST_CONTEXT, MOST_CONTEXT),
        help="Tokens that the model sees at once; at most what its architecture is made for.",
    ),
    click.option(
        "--length",
        type=click.Choice(list(LENGTHS)),
        help="Inner steps of each learner: "
        + ", ".join(f"{name} {length.steps}" for name, length in LENGTHS.items())
        + "; else the preset's schedule.",
    ),
    click.option(
        "--tokens", type=click.IntRange(1, 1 << 50), help="Length instead: tokens of all learners together."
    ),
    click.option(
        "--epochs",
        type=click.IntRange(1, MOST_EPOCHS),
        help="Length instead: how often the run reads the data that --data names and that are here.",
    ),
)


class TrainingWish(Struct, frozen=True, kw_only=True):
    """Choices of a person about training; what is None or empty was not chosen."""

    finetune: bool = False
    continued: bool = False
    learning_rate: float | None = None
    context: int | None = None
    length: str | None = None
    tokens: int | None = None
    epochs: int | None = None
    has_preset: bool = False
    """True: a person named the preset, and does not have it by default."""

    @property
    def kind(self) -> str:
        """Kind of training of a model that exists (`config.given_rates`)."""
        return CONTINUE if self.continued else FINETUNE

    @property
    def has_length(self) -> bool:
        """True: a person chose the length."""
        return any(value is not None for value in (self.length, self.tokens, self.epochs))

    def is_chosen(self, is_given: bool) -> bool:
        """Tell whether the settings follow from the model, rather than from a preset. `is_given`: there is a
        model to start from."""
        return is_given and not self.has_preset

    def check(self, is_given: bool) -> None:
        """Refuse what contradicts itself. `is_given`: there is a model to start from.

        Raises:
            UserError: one sentence.
        """
        lengths = [f"--{name}" for name in ("length", "tokens", "epochs") if getattr(self, name) is not None]
        flag = "--continue" if self.continued else "--finetune"
        is_kind = self.finetune or self.continued
        rules = (
            (
                not (self.finetune and self.continued),
                "--finetune and --continue are both given",
                "one is a short run on few data, the other long further training",
            ),
            (
                is_given or not is_kind,
                f"{flag} is for a model that exists",
                "name it with --from MODEL",
            ),
            (
                not (is_kind and self.has_preset),
                f"{flag} and --preset are both given, and each brings all settings",
                "leave one of them out",
            ),
            (len(lengths) < 2, f"{' and '.join(lengths)} all say how long the run is", "give one of them"),
        )
        for holds, sentence, hint in rules:
            if not holds:
                raise UserError(sentence, hint)


def with_wish(command: Command) -> Command:
    """Give a command these flags, as one argument `wish`."""

    @wraps(command)
    def wished(**arguments: Any) -> Any:
        own = {name: arguments.pop(name) for name in TrainingWish.__struct_fields__ if name != "has_preset"}
        source = click.get_current_context().get_parameter_source("preset")
        return command(wish=TrainingWish(has_preset=source in GIVEN, **own), **arguments)

    for option in reversed(_OPTIONS):
        option(wished)
    return wished  # type: ignore[return-value]
