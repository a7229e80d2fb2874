"""The environment variables that ckpt reads, all of them. Arguments win over them. Names that are nearly one of these are warned of.

=====================  =======  ==============================================================================
``CKPT_TIMEOUT``       600      seconds without a sign of life after which a rank counts as dead
``CKPT_THREADS``       cores    threads that each rank reads or writes with; by default its share of the
                                machine's cores, at most 4
``CKPT_DIRECT``        auto     ``on``, ``off``: files are written past the page cache where the file
                                system can, or never; ``auto``: large files, where trying shows that it pays
``CKPT_SOCKET_IFNAME``          network interfaces that ranks send each other bytes over, written as for
                                ``NCCL_SOCKET_IFNAME``; by default those of ``GLOO_SOCKET_IFNAME``, or
                                ``NCCL_SOCKET_IFNAME``, or all
``CKPT_SPANS``         on       ``off``: no record of how long each phase of a save took (``ckpt stats``)
``CKPT_CONDITIONAL_PUT``        ``require``: an object store that does not keep the conditions of a write is
                       require  refused; ``emulate``: we look and then write, which protects nothing from
                                another job that saves to the same place at once
``CKPT_PROGRESS``      auto     seconds between two notes of how far a save is, for ``ckpt watch``; ``auto``: 1 on file
                                systems, 5 on object stores; ``off``: none
``CKPT_SOURCES``       all      where the files may lie that virtual checkpoints point into: roots, separated by
                                ``;``. Empty: no virtual checkpoint is read
``CKPT_S3_CHECKSUM``   auto     checksums that an object store compares with what arrives: ``crc32``, ``sha256``
                                or ``md5``; ``auto``: the cheapest that it does compare; ``off``: none
``CKPT_LIVE_SECRET``            what sources and sinks of live state prove to each other that they know; by default
                       none     a file of the source's account on its machine has one
``CKPT_LIVE_LOCAL``    on       ``off``: sinks take live state over the network also from ranks of their machine
``CKPT_MEMORY_DIR``             the folder of the memory daemon, one daemon for each; by default one of the account
``CKPT_MEMORY_BUDGET`` half     bytes that a memory daemon holds at most; by default half of what is available
``CKPT_MEMORY_IDLE``   3600     seconds after which a memory daemon ends that has neither objects nor clients
``CKPT_MEMORY_PORT``   none     the port at which a memory daemon listens for other machines from its start on; by
                                default it listens at a free one when somebody asks for its address
``CKPT_MEMORY``                 daemons of other machines, ``host:port,host:port``: a job also reads what they hold,
                       none     though none of its ranks is there
``CKPT_MEMORY_SECRET``          what memory daemons and their peers on other machines prove to each other that they
                       none     know; by default a file in the daemon's folder has one
``CKPT_DOMAIN``                 what fails together with this machine, such as the name of its rack: second copies
                       host     of files go elsewhere, and sinks take live state from within it first; by default
                                the machine's name
``CKPT_STORAGE_OPTIONS``        a JSON file: URL → the storage options of what lies below it, as
                       none     ``ckpt.configure_storage`` takes them
=====================  =======  ==============================================================================
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from ckpt.errors import UsageError
from ckpt.text.urls import url_text

from .variables import variable

DEFAULT_TIMEOUT = 600.0

Direct = Literal["auto", "on", "off"]


def timeout(given: float | None) -> float:
    return _positive("timeout", given, "CKPT_TIMEOUT", DEFAULT_TIMEOUT)


def threads(given: int | None) -> int:
    return max(1, int(_positive("threads", given, "CKPT_THREADS", float(_cores()))))


def _cores() -> int:
    """Cores that this rank has for itself, at most 4; torchrun says how many ranks share the machine."""
    shared = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cores // (int(shared) if shared.isdigit() and int(shared) else 1)))


def direct() -> Direct:
    text = variable("CKPT_DIRECT", "auto")
    for known in ("auto", "on", "off"):
        if text == known:
            return known
    raise UsageError(f"direct writes are auto, on or off, not {text!r}", where="CKPT_DIRECT")


def socket_interfaces() -> list[tuple[str, str]]:
    """The variables that are set and name network interfaces, and what they say, the most important first."""
    names = ("CKPT_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return [(name, text) for name in names if (text := variable(name, "").strip())]


def spans() -> bool:
    text = variable("CKPT_SPANS", "on")
    if text not in ("on", "off"):
        raise UsageError(f"spans are on or off, not {text!r}", where="CKPT_SPANS")
    return text == "on"


def progress() -> float | None:
    """Seconds between two notes of how far a save is; 0: none, None: as suits the storage."""
    text = variable("CKPT_PROGRESS", "auto")
    if text in ("auto", "off"):
        return None if text == "auto" else 0.0
    return _positive("progress", None, "CKPT_PROGRESS", 1.0)


def conditional_put() -> Literal["require", "emulate"]:
    text = variable("CKPT_CONDITIONAL_PUT", "require")
    if text not in ("require", "emulate"):
        raise UsageError(f"conditional puts are required or emulated: require or emulate, not {text!r}", where="CKPT_CONDITIONAL_PUT")
    return "emulate" if text == "emulate" else "require"


def sources(given: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] | None) -> tuple[str, ...] | None:
    """Roots below which virtual checkpoints may read; None: wherever they point."""
    if given is None:
        text = variable("CKPT_SOURCES")
        if text is None:
            return None
        return tuple(root.strip() for root in text.split(";") if root.strip())
    roots = tuple(map(url_text, (given,) if isinstance(given, str | os.PathLike) else given))
    if not all(isinstance(root, str) and root for root in roots):
        raise UsageError(f"sources are URLs or paths of directories, not {given!r}", hint='sources=["/data/models"]')
    return roots


def s3_checksum() -> Literal["auto", "off", "crc32", "sha256", "md5"]:
    text = variable("CKPT_S3_CHECKSUM", "auto")
    for known in ("auto", "off", "crc32", "sha256", "md5"):
        if text == known:
            return known
    raise UsageError(f"checksums of object stores are auto, off, crc32, sha256 or md5, not {text!r}", where="CKPT_S3_CHECKSUM")


def domain() -> str | None:
    """What fails together with this machine, if somebody says so."""
    return variable("CKPT_DOMAIN", "").strip() or None


def storage_options() -> str | None:
    return variable("CKPT_STORAGE_OPTIONS") or None


def _positive(what: str, given: float | None, name: str, default: float) -> float:
    text: object = given if given is not None else variable(name)
    if text is None:
        return default
    try:
        value = 0.0 if isinstance(given, str) else float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{what} must be a positive number, not {text!r}", where=None if given is not None else name)
    return value


def live_secret() -> str | None:
    return variable("CKPT_LIVE_SECRET") or None


def live_local() -> bool:
    text = variable("CKPT_LIVE_LOCAL", "on")
    if text not in ("on", "off"):
        raise UsageError(f"memory of the same machine is read directly or not: on or off, not {text!r}", where="CKPT_LIVE_LOCAL")
    return text == "on"


def memory_dir() -> str | None:
    return variable("CKPT_MEMORY_DIR") or None


def memory_secret() -> str | None:
    return variable("CKPT_MEMORY_SECRET") or None


def memory_budget() -> str | None:
    """A size, such as ``64GiB``; None: half of what is available."""
    return variable("CKPT_MEMORY_BUDGET") or None


def memory_port() -> int:
    """0: any, when somebody asks."""
    text = variable("CKPT_MEMORY_PORT", "").strip() or "0"
    if not text.isdigit() or int(text) > 65535:
        raise UsageError(f"a port is a number up to 65535, not {text!r}", where="CKPT_MEMORY_PORT")
    return int(text)


def memory_machines() -> Sequence[str]:
    """Addresses of memory daemons, ``host:port``."""
    return tuple(dict.fromkeys(one.strip() for one in variable("CKPT_MEMORY", "").split(",") if one.strip()))


def memory_idle() -> float:
    return _positive("idle time", None, "CKPT_MEMORY_IDLE", 3600.0)
