"""Processes of one machine as one learner, by torch.distributed: one per GPU, or a few on CPU.

Theory of operation
-------------------
Rank 0 is the learner that the daemon knows; it starts the others and sends each the daemon's `Start`. All
have the same parameters and optimizer state, or each has a part of them (`learner.parallel.sharding`). Rank 0
takes every inner step's samples and deals them, so that the data is read once; gradients are summed over all
ranks, then every rank makes the same optimizer step. Between two steps rank 0 does what the daemon wants
(`learner.mailbox`), and the others do what it needs of them (`Order`), until it orders the next step.

Gradients of copies are summed after the last pass over a rank's part, not during it, so ranks need not make
the same number of passes: one may have had to halve its own, for a lack of memory. Of parts they are summed
in every pass.

Processes find each other through a file in a private folder that is gone when they have, and talk over the
loopback device. A rank that ends ends them all: rank 0 watches the others, and everybody's end of a socket
pair with rank 0 closes with it, also by SIGKILL. Then the daemon starts the learner again.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, nn

from p2pdiloco.core.api.config import Amendment
from p2pdiloco.errors import P2PDilocoError, UserError, first_line
from p2pdiloco.learner.device import accelerators, device_count

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from p2pdiloco.tasks.task import Batch

BUCKET_NUMEL = 1 << 24
"""Gradients are summed in buckets of about 64 MiB: few calls, little memory."""
PATIENCE = datetime.timedelta(days=7)
"""Longest wait for other ranks, which rest, evaluate or save with rank 0. A rank that is gone is noticed
otherwise."""
STORE = "rendezvous"
MAX_BATCH_WORDS = 64
"""Words of a batch's description: enough to say how many tensors it has, and of what type and shape."""
DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32, torch.float16)


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(tuple[Amendment, ...]).decode


class RankLost(P2PDilocoError):
    """Error: another process of this learner is gone."""


OrderKind = Literal[
    "end", "step", "restore", "put", "take", "moments", "aside", "evaluate", "back", "amend",
    "plan", "wait", "answer", "fail",
]  # fmt: skip


class Order(Struct, frozen=True):
    """Order of rank 0 to the others, between two inner steps."""

    kind: OrderKind
    """Thing to do: a step, or the end; take over the saved state; put or take a fragment's parameters;
    collect the moments; set the parameters aside, evaluate others, and bring them back
    (`learner.parallel.holding`); go by other amendments. In a program's session (`learner.program.ranks`)
    also: plan fragments; wait on; go on with the answer, or end with the error, that follows."""
    number: int = 0
    """Number of a fragment; of bytes that follow; with a step, the tokens that the run has
    consumed."""
    learners: int = 1
    """Learners of the run, with a step: by these, too, every rank decides whether compiling pays."""


class Ranks:
    """Place of this process among those of its learner; a learner of one process needs nothing of torch."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count
        self.sharded = False
        """True: each rank has a part of the parameters."""

    def shard(self) -> None:
        """Note that each rank has a part of the parameters from now on."""
        self.sharded = True

    def deal(self, take: Callable[[], Batch], samples: int) -> Batch:
        """Take this rank's part of a step's samples, which rank 0 takes."""
        return take()

    def sum_gradients(self, model: nn.Module, loss: Tensor) -> None:
        """Sum gradients and loss (a scalar) over all ranks, in place. A parameter without a gradient in every
        rank (it is frozen, or an expert without a token) stays without: the optimizer leaves it alone."""

    def order(self, kind: OrderKind, number: int = 0, learners: int = 1) -> None:
        """Tell the other ranks, if there are any, as rank 0."""

    def next_order(self) -> Order:
        """Wait for rank 0's next order."""
        raise NotImplementedError

    def share(self, batch: Batch) -> Batch:
        """Share rank 0's batch (others give none) with all, on the CPU."""
        return batch

    def tell(self, kind: OrderKind, message: object) -> None:
        """Tell the other ranks, if there are any, a message (msgpack takes it) with an order, as rank 0."""
        if self.count > 1 and self.rank == 0:
            data = _encode(message)
            self.order(kind, len(data))
            self.pass_on(data, len(data))

    def tell_amendments(self, amendments: tuple[Amendment, ...]) -> None:
        """Tell the other ranks, if there are any, by which amendments to go, as rank 0."""
        self.tell("amend", amendments)

    def hear_amendments(self, told: Order) -> tuple[Amendment, ...]:
        """Hear from rank 0 by which amendments to go, which it told."""
        return _decode(self.pass_on(b"", told.number))

    def pass_on(self, data: bytes, count: int, source: int = 0) -> bytes:
        """Pass one rank's bytes (others give none), so many, on to all."""
        return data

    def broadcast(self, tensor: Tensor) -> None:
        """Send rank 0's tensor to every rank's device."""
        raise NotImplementedError

    def send(self, rank: int, tensor: Tensor) -> None:
        """Send a tensor to one other rank."""
        raise NotImplementedError

    def receive(self, rank: int, numel: int) -> Tensor:
        """Receive a tensor from another rank: fp32 (numel,), on the device."""
        raise NotImplementedError


class Distributed(Ranks):
    """Ranks by torch.distributed: NCCL (or what the device has) for tensors, and what the CPU has, gloo, for
    words at boundaries."""

    def __init__(
        self,
        group: ProcessGroup | None,
        control: ProcessGroup | None,
        device: torch.device,
        words: str = "cpu",
    ) -> None:
        """Take two groups of the same ranks (None: of all): `group` carries tensors, on `device`; `control`
        carries words, on the device `words`."""
        from torch import distributed

        super().__init__(distributed.get_rank(group), distributed.get_world_size(group))
        self._distributed = distributed
        self.group, self._control = group, control
        self._device, self._words = device, words

    @classmethod
    def meet(cls, rank: int, count: int, folder: Path, device: torch.device) -> Distributed:
        """Meet the other processes of a learner. `folder`: where they meet, the same for all.

        Raises:
            RankLost: one of them does not come.
        """
        from torch import distributed

        loopback = "lo0" if os.uname().sysname == "Darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        backend = {"cuda": "nccl", "xpu": "xccl"}.get(device.type, "gloo")
        try:
            store = distributed.FileStore(str(folder / STORE), count)  # type: ignore[attr-defined]
            distributed.init_process_group(
                backend, store=store, rank=rank, world_size=count, timeout=PATIENCE
            )
            control = distributed.new_group(backend="gloo", timeout=PATIENCE)
            # Both have their connections from here on: nobody needs the file any more.
            distributed.all_reduce(torch.zeros(1, device=device))
            distributed.barrier(control)
        except RuntimeError as error:
            raise RankLost(f"the processes of this learner do not find each other: {error}") from error
        return cls(None, control, device)

    def deal(self, take: Callable[[], Batch], samples: int) -> Batch:
        mine = slice(samples * self.rank // self.count, samples * (self.rank + 1) // self.count)
        return tuple(tensor[mine] for tensor in self.share(take() if self.rank == 0 else ()))

    def share(self, batch: Batch) -> Batch:
        words = torch.zeros(MAX_BATCH_WORDS, dtype=torch.int64)
        described = [len(batch)]
        for tensor in batch:
            described += [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        words[: len(described)] = torch.tensor(described)
        self._tell_all(words)
        count, *rest = words.tolist()
        parts = []
        for index in range(count):
            dtype, dims, *rest = rest
            shape, rest = rest[:dims], rest[dims:]
            tensor = batch[index].contiguous() if batch else torch.empty(shape, dtype=DTYPES[dtype])
            self._tell_all(tensor)
            parts.append(tensor)
        return tuple(parts)

    def sum_gradients(self, model: nn.Module, loss: Tensor) -> None:
        self._sum([loss])
        if self.sharded:
            return  # they are sums already
        parameters = list(model.parameters())
        given = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        largest = self._distributed.ReduceOp.MAX
        self._call(lambda: self._distributed.all_reduce(given, largest, group=self._control))
        for parameter, somewhere in zip(parameters, given.tolist(), strict=True):
            if somewhere and parameter.grad is None:  # no sample of this rank's, or none that it matters for
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for bucket in _buckets(gradients):
            self._sum(bucket)

    def _sum(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._call(lambda: self._distributed.all_reduce(flat))
        at = 0
        for tensor in tensors:
            tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()

    def broadcast(self, tensor: Tensor) -> None:
        carried = tensor.to(self._device).contiguous()
        self._call(lambda: self._distributed.broadcast(carried, src=self.named(0), group=self.group))
        if self.rank and carried is not tensor:
            tensor.copy_(carried)

    def send(self, rank: int, tensor: Tensor) -> None:
        carried = tensor.to(self._device)
        self._call(lambda: self._distributed.send(carried, self.named(rank), self.group))

    def receive(self, rank: int, numel: int) -> Tensor:
        found = torch.empty(numel, device=self._device)
        self._call(lambda: self._distributed.recv(found, self.named(rank), self.group))
        return found

    def order(self, kind: OrderKind, number: int = 0, learners: int = 1) -> None:
        words = torch.tensor([get_args(OrderKind).index(kind), number, learners], device=self._words)
        self._tell_all(words)

    def next_order(self) -> Order:
        words = torch.zeros(3, dtype=torch.int64, device=self._words)
        self._tell_all(words)
        kind, number, learners = words.tolist()
        return Order(get_args(OrderKind)[kind], number, learners)

    def pass_on(self, data: bytes, count: int, source: int = 0) -> bytes:
        letters = torch.frombuffer(bytearray(data or bytes(count)), dtype=torch.uint8).to(self._words)
        self._tell_all(letters, source)
        return letters.cpu().numpy().tobytes()

    def gather(self, *words: float) -> list[list[float]]:
        """Gather every rank's words, as many from each: by rank, the same for all."""
        mine = torch.tensor(words, dtype=torch.float64, device=self._words)
        found = [torch.empty_like(mine) for _ in range(self.count)]
        self._call(lambda: self._distributed.all_gather(found, mine, group=self._control))
        return [each.tolist() for each in found]

    def _tell_all(self, words: Tensor, source: int = 0) -> None:
        self._call(lambda: self._distributed.broadcast(words, self.named(source), group=self._control))

    def named(self, rank: int) -> int:
        """Name a rank as torch wants it: by its number among all processes."""
        return rank if self.group is None else self._distributed.get_global_rank(self.group, rank)

    def all_say(self, yes: bool) -> bool:
        """Tell whether every rank says yes."""
        votes = torch.tensor([int(yes)])
        self._call(lambda: self._distributed.all_reduce(votes, group=self._control))
        return int(votes) == self.count

    def _call(self, collective) -> None:  # type: ignore[no-untyped-def]
        try:
            collective()
        except RuntimeError as error:
            raise RankLost(f"another process of this learner is gone: {first_line(error)}") from error


ALONE = Ranks()


def count_ranks(wanted: int, device: str) -> int:
    """Number of processes of one learner: as wanted, or (0) one for each GPU if the device is chosen freely.

    Raises:
        UserError: there are not as many devices, or one is named.
    """
    kind, _, index = device.partition(":")
    if kind == "auto":
        kind = _gpus()
    if wanted == 0:
        return 1 if index or kind in ("cpu", "mps") else max(1, device_count(kind))
    if wanted > 1 and index:
        raise UserError(
            f"--nproc {wanted} needs as many devices, and --device {device} is one", "leave it out"
        )
    if wanted > 1 and kind != "cpu" and device_count(kind) < wanted:
        raise UserError(
            f"--nproc {wanted}: this machine has {device_count(kind)} {kind} devices", "use --nproc auto"
        )
    return wanted


def device_of(rank: int, count: int, device: str) -> str:
    """The device of a rank, as `choose_device` wants it."""
    kind = device
    if device == "auto" and count > 1:
        kind = _gpus()
    return kind if count == 1 or kind == "cpu" else f"{kind}:{rank}"


def _gpus() -> str:
    """Kind of device of which a machine may have several, if it has any."""
    return next((kind for kind in accelerators() if kind != "mps"), "cpu")


def meeting_place() -> tempfile.TemporaryDirectory[str]:
    """A private folder (mode 0700) for the ranks' rendezvous."""
    return tempfile.TemporaryDirectory(prefix="p2pdiloco-ranks-", ignore_cleanup_errors=True)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET_NUMEL:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
