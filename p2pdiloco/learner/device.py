"""Choice of device, precision, and of how much of a step fits into memory at a time."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import get_args

import torch

from p2pdiloco.config.settings import Precision
from p2pdiloco.errors import UserError, first_line, invariant
from p2pdiloco.util import lower_process

CPU_MICRO_BATCH_TOKENS = 2048
"""Tokens of a pass on a processor: more are not faster (docs/topics/devices.md), and a pass that does not fit
is not refused there: the system ends the process."""
ACCELERATOR_MICRO_BATCH_TOKENS = 65_536
"""Tokens of a pass on an accelerator, to begin with. With a fourth of them passes are 7 % slower (`gpt2`
on an H100; docs/results.md). A pass that does not fit is halved until it does (`learner.passes`)."""
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
NAMES = {"cuda": "CUDA", "rocm": "ROCm", "mps": "MPS", "xpu": "XPU"}


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
            f"--device {wanted}: torch {torch.__version__} sees {has} of {NAMES.get(kind, kind)} here",
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
    return ["cpu", *(kind for kind in NAMES if device_count(kind))]


def threads_of(processes: int, device: torch.device) -> int:
    """CPU threads for each of so many processes on this machine; 0: torch's own choice."""
    return max(1, (os.cpu_count() or 1) // processes) if processes > 1 and device.type == "cpu" else 0


def configure(device: torch.device, threads: int) -> int:
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


def hints(wanted: str, device: torch.device) -> list[str]:
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
