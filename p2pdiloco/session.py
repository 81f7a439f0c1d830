"""`p2pdiloco.Session`: a training loop of your own as a node's learner.

The session starts the real daemon as a process of its own, as `p2pdiloco node` does, and is its learner
(`session_node`). The program's process has the model. It talks to the daemon over socket and shared memory,
as a learner does that the daemon starts itself (`daemon.learner.guest`, `learner.channel`,
`tensors.exchange`).
Where a program has several ranks, the first one has the node (`learner.program.ranks`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, SupportsFloat, SupportsInt

from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from p2pdiloco.config.folders import expanded
from p2pdiloco.errors import UserError
from p2pdiloco.learner.parallel.ranks import Distributed
from p2pdiloco.learner.program.following import FollowingRank
from p2pdiloco.learner.program.ranks import ProgramRanks, begin, ranks_of, total
from p2pdiloco.session_node import SessionNode
from p2pdiloco.tasks.models.parameters import unwrapped

NO_NUMBER = (TypeError, ValueError, OverflowError, RuntimeError)
"""Errors that `int` and `float` raise for text, NaN, infinity, and tensors of several numbers."""


class Session:
    """Membership of your program in a run. Use it as a context manager; one `step` after every inner step.

    When it begins, the model has the run's global parameters, moved by what an earlier session with this
    folder had not contributed yet when it was closed. Between two inner steps it may change them in place, as
    merges come; your optimizer's moments are left alone. `close` (or the end of the `with` block) lets the
    daemon leave in good order: it takes up to 10 s, of a large model longer (docs/topics/session.md).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        run: str | Path = "",
        join: str | Sequence[str] = (),
        *,
        data_dir: str | Path = "~/.p2pdiloco/session",
        evaluate: Callable[[], float] | None = None,
        options: Sequence[str] = (),
        timeout_s: float = 300.0,
        group: ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            model: its parameters are what is trained; on any device. Compiled or not, in DDP or not; of
                FSDP2, after `fully_shard`. They are looked up by name at every step: the model may move to
                another device, and its parameters may get other memory, but keep their names, shapes and
                number types.
            optimizer: its learning rate is looked at, for reports, and whether it has the model's parameters.
            run: name or id of a run that the peers know; or a run.toml (a Path, or ending in .toml) that is
                begun here, of which this node is then the owner.
            join: link to the run, or the address of a bootstrap or of a node, or several.
            data_dir: the node's folder.
            evaluate: the loss of the model on held-out data. It is called now and then between two steps,
                while the model has the global parameters, and must not change it.
            options: further flags of `p2pdiloco node`. These and `join` are for a daemon that is started: one
                that an earlier life of this program left behind goes on as it was.
            timeout_s: how long the run may take to be joined, and other ranks may take to begin.
            group: the torch.distributed processes that train this model together, each of which makes the
                same calls; None: all of the default group, if there is one. The first rank has the node.

        Raises:
            UserError: the daemon cannot start, the run is not found in time, or trains another model; the
                folder is another program's, or its daemon is in another run. Of several ranks: one does not
                begin, or has another model. What is wrong in one is an error in all.
        """
        inside = unwrapped(model)
        folder = expanded(Path(data_dir), "data_dir")
        self._computing = False
        self._on_merge: list[Callable[[], object]] = []
        ranks = ranks_of(group, inside)
        begin(ranks, inside, evaluate is not None, timeout_s)
        self._role: SessionNode | FollowingRank
        if isinstance(ranks, Distributed) and ranks.rank:
            self._role = FollowingRank(ranks, inside, optimizer, evaluate)
        else:
            self._role = SessionNode(folder, inside, evaluate, ranks)
        self._ranks = ProgramRanks(ranks, self._role)
        words = [*_flags(run, join), *options]
        is_file = isinstance(run, Path) or run.endswith(".toml")
        place = Path(run) if is_file else run
        self._answer = self._ranks.call(lambda: self._role.begin(optimizer, place, words, timeout_s))
        takes_over = getattr(optimizer, "reload_model_params", None)
        if callable(takes_over):  # Megatron's, which has masters
            self.on_merge(takes_over)

    def step(self, tokens: SupportsInt, loss: SupportsFloat) -> bool:
        """Count an inner step over so many tokens, with that mean loss, and do what the swarm asks for.
        False: the run has ended, or the daemon: go on without it or end. While the run's owner has paused it,
        or this machine's owner wants it to rest (docs/topics/limits.md), this waits until it goes on.

        Of several ranks each says its own: tokens are summed, losses averaged, weighted by tokens.

        Raises:
            UserError: more tokens than the run allows for one step, no whole number of them, no number for
                the loss (of tensors, NumPy's and Python's all will do), or the daemon broke (with its
                reason); the losses of ten steps in a row are NaN or infinite; within `computing`; another
                rank is gone, or has other parameters than the first. And, which ends the session: a parameter
                is missing, has another shape or number type, or is another object than the optimizer's; or
                what merges put into the model is gone a step later.
        """
        self._outside("step")
        self._answer = replace(self._answer, merged=False)
        if self._role.stopped:
            return False

        def say() -> Sequence[float]:
            self._role.look(stepped=True)
            return _whole(tokens), _real(loss), *self._ranks.few()

        count, mean = total(self._ranks.meet("Session.step", say))
        self._answer = self._ranks.call(lambda: self._role.step(count, mean))
        self._tell_merged()
        return self._answer.goes_on

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Context for what takes long in an inner step and changes no parameters: forward and backward.

        The optimizer's step is outside. What the swarm asks for in this time is answered at once, from
        another thread. Without it, that waits for your next `step`; if your steps are long, all others'
        versions wait too.

        Raises:
            UserError: the daemon broke (with its reason); within another such block; parameters are others,
                as `step` says. Of several ranks this one alone has it; the others hear of it in `step`.
        """
        self._outside("computing")
        if self._role.stopped:
            yield
            return
        with self._role.computing():
            self._computing = True
            try:
                yield
            finally:
                self._computing = False

    def close(self) -> None:
        """Leave the run in good order. What is sent already is still merged, what is not is kept for the next
        session with this folder; later calls do nothing. Of several ranks all close together.

        Raises:
            UserError: within `computing`; ranks are in different calls; parameters are others, as `step`
                says: then nothing is kept.
        """
        self._outside("close")
        try:
            if not self._role.stopped:
                self._ranks.meet("Session.close", self._looked)
                self._answer = self._ranks.call(self._role.leave)
                self._tell_merged()
        finally:
            self._role.end()

    def _looked(self) -> Sequence[float]:
        self._role.look()
        return ()

    def _outside(self, what: str) -> None:
        if self._computing:
            raise UserError(f"Session.{what} within Session.computing", "it comes after the block")

    def _tell_merged(self) -> None:
        if self._answer.merged:
            for function in self._on_merge:
                function()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of this node, the best first: what others give as `join`."""
        return self._role.addresses

    @property
    def merged(self) -> bool:
        """True: the last `step` has changed the model's parameters, as a merge came."""
        return self._answer.merged

    def on_merge(self, function: Callable[[], object]) -> None:
        """Have a function called whenever a merge has changed the model's parameters, before `step` returns;
        and now, as the session began with the run's. In it, who has copies of the parameters (an optimizer
        with fp32 masters, an average) takes them over."""
        self._on_merge.append(function)
        function()

    @property
    def inner_step(self) -> int:
        """Inner steps of this session so far."""
        return self._answer.inner_step

    @property
    def run_tokens(self) -> int:
        """Tokens that all learners of the run have consumed, about; they never go back. They are the clock of
        a learning rate that suits a program that joins late, too."""
        return self._answer.run_tokens

    @property
    def schedule_tokens(self) -> int:
        """`run_tokens` at the end of the run's schedule, as its owner wants it now."""
        return self._answer.schedule_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._ranks.part()  # nobody knows where the other ranks are
        self.close()


def _flags(run: str | Path, join: str | Sequence[str]) -> list[str]:
    """Flags of `p2pdiloco node` that say which run, and where it is joined."""
    begins = isinstance(run, Path) or run.endswith(".toml")
    words = ["--genesis", "--run-file", str(run)] if begins else ["--run", str(run)] if run else []
    for address in (join,) if isinstance(join, str) else join:
        words += ["--join", address]
    return words


def _whole(tokens: SupportsInt) -> int:
    """Take whatever programs count with as Python's own number. Raises: UserError."""
    with contextlib.suppress(*NO_NUMBER):
        if int(tokens) == tokens:
            return int(tokens)
    raise UserError(f"Session.step: tokens must be a whole number, it is {tokens!r:.80}")


def _real(loss: SupportsFloat) -> float:
    """Take a loss in whatever type as Python's own number. Raises: UserError."""
    with contextlib.suppress(*NO_NUMBER):
        return float(loss.detach() if isinstance(loss, Tensor) else loss)
    raise UserError(f"Session.step: loss must be a number, it is {loss!r:.80}")
