"""Flags of `run new` about how a model is trained and on which data; which of them contradict each other.

The manifest names kinds of data only, never a path: a path of `--data` says what kind it is, and is read to
count its tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from click.core import ParameterSource
from msgspec.structs import replace

from p2pdiloco.cli.options import Number
from p2pdiloco.config.manifest import DataSection, Manifest
from p2pdiloco.config.presets import CONTINUE, FINETUNE, LENGTHS
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.documents import SUFFIXES
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.task import Shards
from p2pdiloco.util import Frozen

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


class TrainingWish(Frozen, kw_only=True):
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
        """Kind of training of a model that exists (`presets.KINDS`)."""
        return CONTINUE if self.continued else FINETUNE

    def is_chosen(self, is_given: bool) -> bool:
        """Tell whether the settings follow from the model, rather than from a preset. `is_given`: there is a
        model to start from."""
        return is_given and not self.has_preset

    def lengths(self) -> list[str]:
        """Options that say how long the run is."""
        return [f"--{name}" for name in ("length", "tokens", "epochs") if getattr(self, name) is not None]

    def check(self, is_given: bool) -> None:
        """Refuse what contradicts itself. `is_given`: there is a model to start from.

        Raises:
            UserError: one sentence.
        """
        lengths = self.lengths()
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


# `run new --data`: a kind of source, a data set of the hub, or a path; and how many tokens are there.

SOURCES = ("embedded", "files", "jsonl", "parquet")
HUB = "hub:"
_KEPT = (
    *("field", "shuffle_samples", "heldout_percent"),
    *("tokenizer", "tokenizer_revision", "tokenizer_digest"),
    *("end_of_document", "begin_of_document"),
)
"""Keys of `[data]` that are not about one source."""


def data_source(word: str) -> str:
    """Check a source of data, as `--data` names it. Raises: UserError."""
    if word not in SOURCES and not (word.startswith(HUB) and word.count("/") == 1):
        raise UserError(f'data are {", ".join(SOURCES)}, {HUB}OWNER/NAME or a path that exists, not "{word}"')
    return word


def with_data(manifest: Manifest, word: str) -> tuple[Manifest, Path | None]:
    """Copy of the manifest that reads what `--data` says, and the path if it says one. Empty: as it is.

    Raises:
        UserError: there is no such source or path; a folder holds files of two kinds.
    """
    if not word:
        return manifest, None
    # (os.path takes what no path can be for one that is not there)
    path = None if word in SOURCES or not os.path.exists(word) else Path(word)  # noqa: PTH110
    kind, _, dataset = (_kind(path) if path else data_source(word)).partition(":")
    section = msgspec.to_builtins(DataSection()) | {"source": kind, "dataset": dataset}
    section |= {name: getattr(manifest.data, name) for name in _KEPT}
    try:
        data = msgspec.convert(section, DataSection)
    except msgspec.ValidationError as error:
        raise UserError(f'"{dataset}" is no name of a data set, OWNER/NAME') from error
    return replace(manifest, data=data), path


def check_countable(source: DataSection, path: Path | None) -> None:
    """Refuse data of which nobody here can say how many tokens they have. Raises: UserError."""
    if path is None and source.source != "embedded":
        what = f"{HUB}{source.dataset}" if source.source == "hub" else source.source
        raise UserError(
            f"--epochs counts the tokens of data that are here, which --data {what} does not name",
            "--data PATH is counted; or say how long the run is with --tokens",
        )


def count_tokens(manifest: Manifest, content: bytes | None, path: Path | None) -> int:
    """Tokens of the data that are trained on, as the run's tokenizer makes them; of images, their number.

    `content`: the tokenizer's file, None for bytes.

    Raises:
        UserError: the data cannot be read, or are too few for the run's context.
    """
    task = task_of(manifest, content)
    train = task.load_data(None if path is None else str(path)).train
    if isinstance(train, Shards):
        raise UserError(
            "--epochs counts data that are read as a whole, and these are a stream", "give --tokens instead"
        )
    return len(train) * task.tokens_per_sample


def _kind(path: Path) -> str:
    """Kind of source of a file or a folder, by the names in it."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    hidden = (any(part[0] == "." for part in file.relative_to(path).parts) for file in files)
    names = [file.name for file, is_hidden in zip(files, hidden, strict=True) if not is_hidden]
    kinds = [kind for kind, ends in SUFFIXES.items() if any(name.lower().endswith(ends) for name in names)]
    if len(kinds) > 1:
        raise UserError(f"{path} has both {' and '.join(kinds)} files", "give one kind of them")
    return kinds[0] if kinds else "files"
