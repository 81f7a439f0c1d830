"""Memory that daemon and learner share: three flat fp32 areas per fragment.

    base[0], base[1]   double buffer of the fragment's global parameters Theta. The learner's parameters
                       are measured against one of them; the daemon writes a newer version into the other
                       one and posts `Install`.
    sent               the learner's parameters theta as they were at the last copy-out; of a displacement of
                       many sync intervals a share (`core.contributions.stride`).

No lock is needed. The daemon writes only the base buffer that the learner does not use, and not while it
still reads that buffer to encode a contribution (`CopiedOut` names the buffer). The learner writes only
`sent`, at a copy-out, and never while its slot is in use.

The memory has no name in any file system (memfd, or a temporary file that is unlinked at once): the
kernel frees it with the last process that maps it, also after kill -9.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Self

import torch

from p2pdiloco.errors import UserError, invariant
from p2pdiloco.tensors.layout import FragmentLayout
from p2pdiloco.tensors.sizes import AREAS

ALIGN_ELEMENTS = 16
"""Alignment of every area: a cache line (64 bytes)."""


class Exchange:
    """The shared fragment buffers, as seen from one of the two processes.

    `fd` is what the other process needs for `attach`.
    """

    def __init__(self, fd: int, layouts: Sequence[FragmentLayout]) -> None:
        """Map the memory behind `fd`, of which it takes ownership. Use `create` or `attach`."""
        self.fd = fd
        self._numels = [layout.numel for layout in layouts]
        memory = mmap.mmap(fd, exchange_bytes(layouts))
        self._flat: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.float32)
        self._offsets: list[int] = []
        offset = 0
        for numel in self._numels:
            self._offsets.append(offset)
            offset += AREAS * _aligned(numel)

    @classmethod
    def create(cls, layouts: Sequence[FragmentLayout]) -> Self:
        """Make new zeroed memory for these fragments.

        Raises:
            UserError: the machine has not enough memory (three times the model in fp32).
        """
        size = exchange_bytes(layouts)
        fd = _anonymous_file()
        try:
            os.ftruncate(fd, size)
            if hasattr(os, "posix_fallocate"):
                # Without this a full memory is a SIGBUS in the middle of a merge instead of a sentence now.
                os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            raise _refused(size, error) from error
        return cls(fd, layouts)

    @classmethod
    def attach(cls, fd: int, layouts: Sequence[FragmentLayout]) -> Self:
        """Map the memory behind an inherited descriptor; the layouts must be the creator's."""
        actual, expected = os.fstat(fd).st_size, exchange_bytes(layouts)
        invariant(actual == expected, f"exchange has {actual} bytes, these layouts need {expected}")
        return cls(fd, layouts)

    @property
    def fragments(self) -> int:
        """Number of fragments."""
        return len(self._numels)

    def base(self, fragment: int, index: int) -> torch.Tensor:
        """Base buffer 0 or 1 of a fragment: fp32, (numel,), a view of the shared memory."""
        invariant(index in (0, 1), f"base buffer {index}")
        return self._area(fragment, index)

    def sent(self, fragment: int) -> torch.Tensor:
        """The learner's parameters at the last copy-out: fp32, (numel,), a view of the shared memory."""
        return self._area(fragment, 2)

    def close(self) -> None:
        """Let go of the memory. Views that were handed out stay valid; it is freed with the last of them."""
        if self._flat is not None:
            self._flat = None
            os.close(self.fd)
            self.fd = -1

    def _area(self, fragment: int, area: int) -> torch.Tensor:
        invariant(self._flat is not None, "exchange is closed")
        assert self._flat is not None
        numel = self._numels[fragment]
        start = self._offsets[fragment] + area * _aligned(numel)
        return self._flat[start : start + numel]


def _refused(size: int, error: OSError) -> UserError:
    """Explain why there are no buffers of so many bytes. They are a file without a name, so limits of files
    hold."""
    what = f"fragment buffers ({size / 2**20:.3g} MiB)"
    if error.errno == errno.EFBIG:
        return UserError(
            f"the limit of the size of files is too small for the {what}",
            "raise it: `ulimit -f unlimited`, or LimitFSIZE=infinity in a systemd unit",
        )
    return UserError(
        f"no memory for the {what}: {error.strerror}",
        "close other programs, or raise the container's memory limit",
    )


def exchange_bytes(layouts: Sequence[FragmentLayout]) -> int:
    """Size of the shared memory for these fragments."""
    return 4 * AREAS * sum(_aligned(layout.numel) for layout in layouts)


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("p2pdiloco-exchange", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="p2pdiloco-") as file:  # unlinked before it is returned
        return os.dup(file.fileno())
