"""Processes of one machine as one learner, by torch.distributed: one per GPU, or a few on CPU.

Theory of operation
-------------------
Rank 0 is the learner that the daemon knows; it starts the others and sends each the daemon's `Start`. All
have the same parameters and optimizer state, or each has a part of them (`learner.optimizer.shard`). Rank 0
takes every inner step's samples and deals them, so that the data is read once; gradients are summed over all
ranks, then every rank makes the same optimizer step. Between two steps rank 0 does what the daemon wants
(`learner.mailbox`), and the others do what it needs of them (`Order`), until it orders the next step.

Gradients of copies are summed after the last pass over a rank's part, not during it, so ranks need not make
the same number of passes: one may have had to halve its own, for a lack of memory. Of parts they are summed
in every pass.

Processes find each other through a file in a private folder that is gone when they have, and talk over the
loopback device. A rank that ends ends them all: rank 0 watches the others, and everybody's end of a socket
pair with rank 0 closes with it, also by SIGKILL. Then the daemon starts the learner again.

Behind the ranks: the choice of device and precision, and of how much of a step fits into memory at a time.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, get_args

import torch
from msgspec import msgpack
from torch import Tensor, distributed, nn

from p2pdiloco.config.settings import Precision
from p2pdiloco.core.api.config import Amendment
from p2pdiloco.errors import P2PDilocoError, UserError, first_line, invariant
from p2pdiloco.learner.channel import Start, frame
from p2pdiloco.learner.lifeline import EXIT_FAILED, EXIT_RANK_KILLED, EXIT_TOO_LARGE, PassTooLarge, RankKilled
from p2pdiloco.priority import lower_process
from p2pdiloco.tensors.sizes import CPU_MICRO_BATCH_TOKENS
from p2pdiloco.util import Frozen

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from p2pdiloco.tasks.task import Batch

BUCKET_NUMEL = 1 << 24
"""Gradients are summed in buckets of about 64 MiB: few calls, little memory."""
PATIENCE = datetime.timedelta(days=7)
"""Longest wait for other ranks, which rest, evaluate or save with rank 0. A rank that is gone is noticed
otherwise."""
RENDEZVOUS_FILE = "rendezvous"
MAX_BATCH_WORDS = 64
"""Words of a batch's description: enough to say how many tensors it has, and of what type and shape."""
DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32, torch.float16)
_encode = msgpack.encode
_decode = msgpack.Decoder(tuple[Amendment, ...]).decode


class RankLost(P2PDilocoError):
    """Error: another process of this learner is gone."""


OrderKind = Literal[
    "end", "step", "restore", "put", "take", "moments", "aside", "evaluate", "back", "amend",
    "plan", "wait", "answer", "fail",
]  # fmt: skip


class Order(Frozen):
    """Order of rank 0 to the others, between two inner steps."""

    kind: OrderKind
    """Thing to do: a step, or the end; take over the saved state; put or take a fragment's parameters;
    collect the moments; set the parameters aside, evaluate others, and bring them back
    (`learner.optimizer.HeldShares`); go by other amendments. In a program's session (`learner.program_ranks`)
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
        super().__init__(distributed.get_rank(group), distributed.get_world_size(group))
        self.group, self._control = group, control
        self._device, self._words = device, words

    @classmethod
    def meet(cls, rank: int, count: int, folder: Path, device: torch.device) -> Distributed:
        """Meet the other processes of a learner. `folder`: where they meet, the same for all.

        Raises:
            RankLost: one of them does not come.
        """
        loopback = "lo0" if os.uname().sysname == "Darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        backend = {"cuda": "nccl", "xpu": "xccl"}.get(device.type, "gloo")
        try:
            store = distributed.FileStore(str(folder / RENDEZVOUS_FILE), count)  # type: ignore[attr-defined]
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
        count, *described = words.tolist()
        parts = []
        for index in range(count):
            dtype, dims, *described = described
            shape, described = described[:dims], described[dims:]
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
        largest = distributed.ReduceOp.MAX
        self._call(lambda: distributed.all_reduce(given, largest, group=self._control))
        for parameter, somewhere in zip(parameters, given.tolist(), strict=True):
            if somewhere and parameter.grad is None:  # no sample of this rank's, or none that it matters for
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for bucket in _buckets(gradients):
            self._sum(bucket)

    def _sum(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._call(lambda: distributed.all_reduce(flat))
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def broadcast(self, tensor: Tensor) -> None:
        """Send rank 0's tensor to every rank's device."""
        carried = tensor.to(self._device).contiguous()
        self._call(lambda: distributed.broadcast(carried, src=self.named(0), group=self.group))
        if self.rank and carried is not tensor:
            tensor.copy_(carried)

    def send(self, rank: int, tensor: Tensor) -> None:
        """Send a tensor to one other rank."""
        carried = tensor.to(self._device)
        self._call(lambda: distributed.send(carried, self.named(rank), self.group))

    def receive(self, rank: int, numel: int) -> Tensor:
        """Receive a tensor from another rank: fp32 (numel,), on the device."""
        found = torch.empty(numel, device=self._device)
        self._call(lambda: distributed.recv(found, self.named(rank), self.group))
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
        self._call(lambda: distributed.all_gather(found, mine, group=self._control))
        return [each.tolist() for each in found]

    def _tell_all(self, words: Tensor, source: int = 0) -> None:
        self._call(lambda: distributed.broadcast(words, self.named(source), group=self._control))

    def named(self, rank: int) -> int:
        """Name a rank as torch wants it: by its number among all processes."""
        return rank if self.group is None else distributed.get_global_rank(self.group, rank)

    def all_say(self, yes: bool) -> bool:
        """Tell whether every rank says yes."""
        votes = torch.tensor([int(yes)])
        self._call(lambda: distributed.all_reduce(votes, group=self._control))
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
    """Kind of device of which a machine may have several; "cpu": it has none."""
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


SAY_IT_S = 3.0
"""Seconds that the training thread has to notice by itself that a rank is gone, and to tell the daemon."""
END_S = 5.0


class Siblings:
    """The other processes of this learner, which rank 0 starts, and with one of which it ends; a context,
    which ends them."""

    def __init__(self, start: Start, count: int) -> None:
        self._start, self.count = start, count
        self._meeting = meeting_place()
        self.folder = Path(self._meeting.name)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lifelines: list[socket.socket] = []
        self._ending = False
        self._lost = threading.Event()
        self._reason = ""
        self._status = EXIT_FAILED

    def __enter__(self) -> Siblings:
        for rank in range(1, self.count):
            self._spawn(rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending = True
        self.met()
        for sock in self._lifelines if error is not None else ():
            sock.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for sock in self._lifelines:
            sock.close()

    def met(self) -> None:
        """Clean up after all ranks have found each other."""
        self._meeting.cleanup()

    def why(self) -> P2PDilocoError | None:
        """Say which rank ended and how, if one did or does at once."""
        self._lost.wait(SAY_IT_S / 2)
        return _ERRORS[self._status](self._reason) if self._reason else None

    def _spawn(self, rank: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            words = [str(theirs.fileno()), str(rank), str(self.count), str(self.folder)]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "p2pdiloco.learner", *words],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._processes.append(process)
        self._lifelines.append(ours)
        ours.sendall(frame(self._start))
        threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._ending:
            return
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        if code == EXIT_TOO_LARGE:
            how = "a pass does not fit into its memory"
        self._status = _status(self._status, code)
        self._reason = self._reason or f"rank {rank} of this learner ended ({how})"
        self._lost.set()
        # Collectives of some backends wait for ever for one who is gone.
        if not threading.Event().wait(SAY_IT_S) and not self._ending:
            print(self._reason, file=sys.stderr, flush=True)
            os._exit(self._status)


_ERRORS: dict[int, type[P2PDilocoError]] = {
    EXIT_FAILED: RankLost,
    EXIT_TOO_LARGE: PassTooLarge,
    EXIT_RANK_KILLED: RankKilled,
}
"""Error by which this process ends, by its exit status."""


def _status(before: int, code: int) -> int:
    """This process's exit status after another rank ended so: what did not fit counts most."""
    if EXIT_TOO_LARGE in (before, code):
        return EXIT_TOO_LARGE
    return EXIT_RANK_KILLED if code == -signal.SIGKILL else before


# --- device, precision, memory -----------------------------------------------------------------------

ACCELERATOR_MICRO_BATCH_TOKENS = 65_536
"""Tokens of a pass on an accelerator, to begin with. With a fourth of them passes are 7 % slower (`gpt2`
on an H100; docs/results.md). A pass that does not fit is halved until it does (`learner.inner_step`)."""
SHARED_MICRO_BATCH_TOKENS = 16_384
"""Tokens of a pass on MPS, whose memory is the whole machine's: asking for too much makes it swap before it
is refused."""
STAGED_BYTES = 64 << 20
"""Samples of a step that are brought to a GPU ahead and all at once, at most; more go pass by pass."""
AMPERE = 8
"""NVIDIA's first compute capability (major) with bf16."""
NVIDIA_DRIVER = "/proc/driver/nvidia/version"
"""Folder that exists if this system (Linux) has NVIDIA's driver. (AMD's also serves graphics that cannot
learn.)"""
DEVICE_NAMES = {"cuda": "CUDA", "rocm": "ROCm", "mps": "MPS", "xpu": "XPU"}


def choose_device(wanted: str) -> torch.device:
    """Choose the device: "auto" is the best that this machine has, cuda (ROCm too), then xpu, then mps, then
    cpu.

    Anything else is a device by torch's name, or "rocm", which torch calls cuda.

    Raises:
        UserError: no such device here.
    """
    if wanted == "auto":
        return torch.device((*accelerators(), "cpu")[0])
    check_device(wanted)
    if wanted.partition(":")[0] == "cpu":
        return torch.device("cpu")
    device = torch.device(wanted.replace("rocm", "cuda"))
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f'the device "{wanted}" cannot be used: {first_line(error)}') from error
    return device


def check_device(wanted: str) -> None:
    """Check that there is such a device, without a byte of its memory.

    Raises:
        UserError: there is none.
    """
    kind, _, index = wanted.partition(":")
    if kind in ("auto", "cpu"):
        return
    count = device_count(kind)
    if count <= int(index or 0):
        has = f"only {count}" if count else "none"
        raise UserError(
            f"--device {wanted}: torch {torch.__version__} sees {has} of {DEVICE_NAMES.get(kind, kind)} here",
            f"it sees {', '.join(_seen())}; --device auto takes the best",
        )


def accelerators() -> tuple[str, ...]:
    """Kinds of devices beside the CPU that torch can use here, the best first."""
    return tuple(kind for kind in ("cuda", "xpu", "mps") if device_count(kind))


def device_count(kind: str) -> int:
    """Count the devices of a kind that torch can use here: cuda (with ROCm, too), rocm, xpu, mps."""
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    if kind == "xpu":
        return torch.xpu.device_count() if torch.xpu.is_available() else 0
    if kind == "rocm" and torch.version.hip is None:
        return 0
    return torch.cuda.device_count() if kind in ("cuda", "rocm") and torch.cuda.is_available() else 0


def _seen() -> list[str]:
    return ["cpu", *(kind for kind in DEVICE_NAMES if device_count(kind))]


def threads_of(processes: int, device: torch.device) -> int:
    """CPU threads for each of so many processes on this machine; 0: torch's own choice."""
    return max(1, (os.cpu_count() or 1) // processes) if processes > 1 and device.type == "cpu" else 0


def configure_torch(device: torch.device, threads: int) -> int:
    """Set torch's CPU threads (0: leave them) and matmul precision; returns the threads in use."""
    if threads > 0:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        if device.index is not None:
            torch.cuda.set_device(device)
    return torch.get_num_threads()


def autocast(device: torch.device, bf16: bool) -> contextlib.AbstractContextManager[object]:
    """Context of a pass in bf16, or of nothing: parameters and gradients stay fp32."""
    if bf16:
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def passes_in_bf16(device: torch.device, precision: str) -> bool:
    """Tell whether a model on this device makes its passes in bf16; `precision` as in `LearnerOptions`."""
    invariant(precision in get_args(Precision), f"{precision} is no precision")
    return precision == "auto" and computes_in_bf16(device.type)


@functools.cache
def computes_in_bf16(kind: str) -> bool:
    """Tell whether devices of this kind are fast at bf16, here. CPUs are if they have instructions for it
    (`scripts/bench/study/bench_bf16.py`); ARM's were not measured."""
    if kind == "cuda":
        # Before Ampere bf16 is emulated, slower than fp32; torch says that it is supported.
        is_new = torch.version.hip is not None or torch.cuda.get_device_capability()[0] >= AMPERE
        return is_new and bool(torch.cuda.is_bf16_supported())
    if kind == "xpu":
        return bool(getattr(torch.xpu, "is_bf16_supported", lambda: True)())
    if kind == "mps":
        try:
            torch.ones(1, dtype=torch.bfloat16, device="mps").add_(1)
            with torch.autocast("mps", dtype=torch.bfloat16):
                return True
        except (RuntimeError, TypeError):  # an older macOS, an older torch
            return False
    return kind == "cpu" and _has_bf16_instructions()


def _has_bf16_instructions() -> bool:
    """Tell whether torch uses the CPU's bf16 instructions of AVX-512 or AMX. torch before 2.11 cannot tell:
    no."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(torch.cpu, "get_capabilities"):
        return False
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def multiplies_bf16(kind: str) -> bool:
    """Tell whether Muon's matrices are multiplied in bf16 by devices of this kind, here: where passes are,
    too.

    On CPUs its step then takes half (`tiny`) or a fourth (`small`) of the time in fp32. Without instructions
    for bf16 it takes 1.5 times (AVX-512) and 16 times (AVX2) as long (`scripts/bench/study/bench_muon.py`).
    MPS was not measured.
    """
    return kind != "mps" and computes_in_bf16(kind)


def step_back(niceness: int) -> None:
    """Let everything else on this machine go first: the daemon's answers, and whatever else its user does."""
    if not lower_process(os.getpid(), niceness):
        print("niceness stays as it is, of the session or of threads", file=sys.stderr)


def staged(batch: tuple[torch.Tensor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The batch, or a copy of it that is queued on its way to a CUDA device, which may still compute."""
    if device.type != "cuda" or sum(tensor.nbytes for tensor in batch) > STAGED_BYTES:
        return batch
    return tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in batch)


def micro_batch_tokens(device: torch.device, wanted: int, tokens_per_step: int) -> int:
    """Tokens of one forward and backward pass, to begin with: as wanted, or all at once within a bound."""
    most = {"cpu": CPU_MICRO_BATCH_TOKENS, "mps": SHARED_MICRO_BATCH_TOKENS}
    return min(wanted or most.get(device.type, ACCELERATOR_MICRO_BATCH_TOKENS), tokens_per_step)


def device_hints(wanted: str, device: torch.device) -> list[str]:
    """Advice for somebody whose model could train much faster, as far as is known. `wanted`: as in
    `choose_device`."""
    found = []
    has_driver = os.path.exists(NVIDIA_DRIVER)  # noqa: PTH110 (pathlib's raises where a sandbox hides /proc)
    if wanted == "auto" and device.type == "cpu" and has_driver:
        why = (
            "its driver may be too old, or not yours to use" if torch.version.cuda else "it is built without"
        )
        found.append(
            f"this machine has an NVIDIA GPU that torch {torch.__version__} cannot use ({why}): training on "
            "the CPU; with --device cpu this is not said"
        )
    return found


def out_of_memory(error: BaseException) -> str:
    """Words of a device or the machine whose memory was too small; "" for any other error.

    They are the error's first two sentences: what torch says of other processes and of its allocator's
    settings would hide them.
    """
    text = first_line(error)
    signs = ("out of memory", "can't allocate memory", "not enough memory")
    if not isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) and not any(s in text for s in signs):
        return ""
    return ". ".join(text.split(". ")[:2]).removesuffix(".")


def free_bytes(device: torch.device, processes: int) -> int | None:
    """Bytes that a process may use of its device's memory, or as its part of the machine's; None: unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu" and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes
    return None


def give_memory_back(device: torch.device) -> None:
    """Return cached blocks, so that smaller ones can be cut from them."""
    if device.type in ("cuda", "xpu", "mps"):
        getattr(torch, device.type).empty_cache()
