"""What memory on GPUs needs beside copies: order between streams, pinned host memory, and peace with CUDA graphs.

Threads of a save or a load use streams of their own, and streams of PyTorch do not wait for each other. So a call that returns when all is
done waits for the devices before other threads touch their memory, and again before its caller does; a save in the background orders its
side streams instead (``capture.py``).

A CUDA graph changes memory when it is replayed, and tells nobody: no optimizer's hook runs, no tensor's version counts. While it is
captured, calls of other threads may break it. So both wait for what is being captured of the state, as an optimizer's step does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckpt.concurrency import Pending
from ckpt.errors import CkptError, UsageError
from ckpt.state import lazy
from ckpt.state.tensors import LocalTensor

if TYPE_CHECKING:
    import torch

log = logging.getLogger("ckpt")

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices of the process."""


def devices_of(tensors: Iterable[LocalTensor]) -> set[torch.device]:
    """The GPUs that hold something of them."""
    return {part.memory.device for local in tensors for part in local.parts if part.memory.is_cuda}


def settle_devices(devices: Collection[torch.device], url: str) -> None:
    """Wait for all that was queued on these GPUs, on any stream."""
    refuse_in_graph(devices, url)
    for device in devices:
        lazy.torch.cuda.synchronize(device)


def refuse_in_graph(devices: Iterable[torch.device], url: str) -> None:
    """Raise UsageError if this thread captures a CUDA graph on one of the devices: what it does now is not done, only noted."""
    for device in devices:
        with lazy.torch.cuda.device(device):
            if lazy.torch.cuda.is_current_stream_capturing():
                hint = "save and load outside of `with torch.cuda.graph(...)`"
                raise UsageError("a CUDA graph is being captured, and no save or load can be a part of it", where=url, hint=hint)


def pin(memory: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Let a GPU copy from and to host memory by itself; gives what ends that, to be called before the memory is freed.

    Registered as it is, since PyTorch's own pinned memory has sizes of powers of two. In a thread of its own: an error of the CUDA runtime
    stays with the thread, and the next kernel that the caller starts would report it.
    """
    address, nbytes = memory.data_ptr(), memory.numel() * memory.element_size()

    def register() -> int:
        with lazy.torch.cuda.device(device):  # else a thread begins with a context on the first device
            return int(lazy.torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]

    error = Pending(register, "ckpt-pin").result()
    if error:
        raise no_memory(nbytes, f"the CUDA runtime pins no more host memory (error {error})")

    def unregister() -> None:
        lazy.torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    return unregister


def no_memory(nbytes: int, why: str) -> CkptError:
    return CkptError(
        f"there is no host memory for {nbytes:,} bytes, which a save in the background needs to capture this rank's share: {why}",
        hint="staging_bytes= bounds it; ckpt.save needs none; for pinned memory see also `ulimit -l` and the limit of the container",
    )


_warned = False
"""Whether the log was told that memory could not be pinned."""


def pinned_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that a GPU copies from at full speed, of PyTorch's own pool; plain memory, which is slower, where that has none."""
    global _warned
    try:
        memory: npt.NDArray[np.uint8] = lazy.torch.empty(nbytes, dtype=lazy.torch.uint8, pin_memory=True).numpy()
        return memory
    except RuntimeError as err:
        if not _warned:
            _warned = True
            log.warning("a load onto a GPU goes through memory that is not pinned, which is slower: %s", err)
        return np.empty(nbytes, dtype=np.uint8)


@cache
def watch_graphs(wait: Callable[[], None]) -> None:
    """Call ``wait`` before a CUDA graph is replayed or captured. Once for the life of the process."""
    waits_first(lazy.torch.cuda.CUDAGraph, ("replay", "capture_begin"), wait)


def waits_first(kind: type, methods: Iterable[str], wait: Callable[[], None]) -> None:
    """Let methods of a class call ``wait`` before they begin."""

    def waiting(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def after(*args: Any, **kwargs: Any) -> Any:
            wait()
            return method(*args, **kwargs)

        return after

    for name in methods:
        setattr(kind, name, waiting(getattr(kind, name)))
