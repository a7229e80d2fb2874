"""The environment variables that ckpt reads, all of them, and the sizes that this software has chosen. Arguments win over variables. Names
that are nearly one of these are warned of.

=====================  =======  ==============================================================================
``CKPT_TIMEOUT``       600      seconds without a sign of life after which a rank counts as dead
``CKPT_THREADS``       cores    threads that each rank reads or writes with; by default its share of the
                                machine's cores, at most 4
``CKPT_DIRECT``        auto     ``on``, ``off``: files are written past the page cache where the file
                                system can, or never; ``auto``: large files, where trying shows that it pays
``CKPT_SOCKET_IFNAME``          network interfaces that ranks send each other bytes over, written as for
                                ``NCCL_SOCKET_IFNAME``; by default those of ``GLOO_SOCKET_IFNAME``, or
                                ``NCCL_SOCKET_IFNAME``, or all
``CKPT_RUN_LOG``       on       ``off``: no ``ckpt-log.json`` below a run, which notes the newest 20 failed saves and loads for
                                ``ckpt report`` and ``ckpt stats``
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
``CKPT_PROVE``                  the folder of one run of a proof: ``ckpt prove`` sets it
                       none
``CKPT_STORAGE_OPTIONS``        a JSON file: URL → the storage options of what lies below it, as
                       none     ``ckpt.configure_storage`` takes them
=====================  =======  ==============================================================================
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, Literal, ParamSpec, TypeVar, overload

from .errors import UsageError
from .text import close_names, url_text

# Reading environment variables, and a warning about those that look like one of ours and are none.

__version__ = "0.1.0"
"""The version, in one place."""

PREFIX = "CKPT_"
NAMES = (
    "CKPT_CONDITIONAL_PUT",
    "CKPT_DIRECT",
    "CKPT_DOMAIN",
    "CKPT_LIVE_LOCAL",
    "CKPT_LIVE_SECRET",
    "CKPT_MEMORY",
    "CKPT_MEMORY_BUDGET",
    "CKPT_MEMORY_DIR",
    "CKPT_MEMORY_IDLE",
    "CKPT_MEMORY_PORT",
    "CKPT_MEMORY_SECRET",
    "CKPT_PROGRESS",
    "CKPT_PROVE",
    "CKPT_RUN_LOG",
    "CKPT_S3_CHECKSUM",
    "CKPT_SOCKET_IFNAME",
    "CKPT_SOURCES",
    "CKPT_SPANS",
    "CKPT_STORAGE_OPTIONS",
    "CKPT_THREADS",
    "CKPT_TIMEOUT",
)

log = logging.getLogger("ckpt")

C = TypeVar("C", bound=str)
P = ParamSpec("P")
R = TypeVar("R")


@overload
def variable(name: str) -> str | None: ...


@overload
def variable(name: str, default: str) -> str: ...


def variable(name: str, default: str | None = None) -> str | None:
    """The value of one of ``NAMES``, or of a variable of others."""
    warn_of_misspelt()
    return os.environ.get(name, default)


@cache
def warn_of_misspelt() -> None:
    """Warn, once in a process, of variables whose names are nearly ours. Others that begin so may be the user's own."""
    known = [name.removeprefix(PREFIX) for name in NAMES]
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in NAMES and (near := close_names(name.removeprefix(PREFIX), known, 1)):
            log.warning("the environment variable %s is ignored: ckpt has none of this name. Did you mean %s%s?", name, PREFIX, near[0])


DEFAULT_TIMEOUT = 600.0

Direct = Literal["auto", "on", "off"]
Switch = Literal["on", "off"]


def timeout(given: float | None) -> float:
    return _positive("timeout", given, "CKPT_TIMEOUT", DEFAULT_TIMEOUT)


def threads(given: int | None) -> int:
    """By default the cores that this rank has for itself, at most 4; torchrun says how many ranks share the machine."""
    shared = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if isinstance(given, float):
        raise UsageError(f"threads must be a whole number, not {given!r}")
    own = max(1, min(4, cores // (int(shared) if shared.isdigit() and int(shared) else 1)))
    return max(1, int(_positive("threads", given, "CKPT_THREADS", float(own))))


@dataclass(frozen=True)
class Choice(Generic[C]):
    """A variable that has one of some values, the first by default: called, it says which. ``rule`` is for the error."""

    name: str
    choices: Sequence[C]
    rule: str

    def __call__(self) -> C:
        given = variable(self.name, self.choices[0])
        for choice in self.choices:
            if given == choice:
                return choice
        raise UsageError(f"{self.rule}, not {given!r}", where=self.name)


direct: Choice[Direct] = Choice("CKPT_DIRECT", ("auto", "on", "off"), "direct writes are auto, on or off")
run_log: Choice[Switch] = Choice("CKPT_RUN_LOG", ("on", "off"), "the log of a run is on or off")
spans: Choice[Switch] = Choice("CKPT_SPANS", ("on", "off"), "spans are on or off")
live_local: Choice[Switch] = Choice("CKPT_LIVE_LOCAL", ("on", "off"), "memory of the same machine is read directly or not: on or off")
conditional_put: Choice[Literal["require", "emulate"]] = Choice(
    "CKPT_CONDITIONAL_PUT", ("require", "emulate"), "conditional puts are required or emulated: require or emulate"
)
s3_checksum: Choice[Literal["auto", "off", "crc32", "sha256", "md5"]] = Choice(
    "CKPT_S3_CHECKSUM", ("auto", "off", "crc32", "sha256", "md5"), "checksums of object stores are auto, off, crc32, sha256 or md5"
)


def socket_interfaces() -> list[tuple[str, str]]:
    """The variables that are set and name network interfaces, and what they say, the most important first."""
    names = ("CKPT_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return [(name, given) for name in names if (given := variable(name, "").strip())]


def progress() -> float | None:
    """Seconds between two notes of how far a save is; 0: none, None: as suits the storage."""
    given = variable("CKPT_PROGRESS", "auto")
    if given in ("auto", "off"):
        return None if given == "auto" else 0.0
    return _positive("progress", None, "CKPT_PROGRESS", 1.0)


def sources(given: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] | None) -> tuple[str, ...] | None:
    """Roots below which virtual checkpoints may read; None: wherever they point."""
    if given is None:
        listed = variable("CKPT_SOURCES")
        return None if listed is None else tuple(root.strip() for root in listed.split(";") if root.strip())
    several: object = (given,) if isinstance(given, str | os.PathLike) else given
    roots = tuple(map(url_text, several)) if isinstance(several, Iterable) else ()
    if not isinstance(several, Iterable) or not all(isinstance(root, str) and root for root in roots):
        raise UsageError(f"sources are URLs or paths of directories, not {given!r}", hint='sources=["/data/models"]')
    return roots


def domain() -> str | None:
    """What fails together with this machine, if somebody says so."""
    return variable("CKPT_DOMAIN", "").strip() or None


def _positive(what: str, given: float | None, name: str, default: float) -> float:
    number: object = given if given is not None else variable(name)
    if number is None:
        return default
    try:
        value = 0.0 if isinstance(given, str) else float(number)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{what} must be a positive number, not {number!r}", where=None if given is not None else name)
    return value


def memory_port() -> int:
    """0: any, when somebody asks."""
    port = variable("CKPT_MEMORY_PORT", "").strip() or "0"
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"a port is a number up to 65535, not {port!r}", where="CKPT_MEMORY_PORT")
    return int(port)


def memory_machines() -> Sequence[str]:
    """Addresses of memory daemons, ``host:port``."""
    return tuple(dict.fromkeys(one.strip() for one in variable("CKPT_MEMORY", "").split(",") if one.strip()))


def memory_idle() -> float:
    return _positive("idle time", None, "CKPT_MEMORY_IDLE", 3600.0)


# Checks of arguments.


def check_flags(**given: object) -> None:
    """Raise UsageError unless all are True or False. Text such as "no" would otherwise count as True."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name}= is True or False, not {value!r}")


def check_whole(value: object, what: str, least: int, hint: str | None = None) -> None:
    """Raise UsageError unless ``value`` is an int of at least ``least``; ``what`` names it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        hint = f"pass an int: int({value})" if type(value).__module__ == "numpy" else hint
        raise UsageError(f"{what} is a whole number of at least {least}, not {value!r}", hint=hint)


def check_positive(value: object, what: str, *, zero: bool = False) -> None:
    """Raise UsageError unless ``value`` is a finite int or float above 0, or 0 if ``zero``; ``what`` names it."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    if not good or (value == 0 and not zero):
        hint = f"pass a float: float({value})" if type(value).__module__ == "numpy" else None
        raise UsageError(f"{what} is a {'number that is not negative' if zero else 'positive number'}, not {value!r}", hint=hint)


# Sizes that are choices of this software: each rule once, in bytes, with the reason for its value.
#
# Code asks for ``settings.CHUNK`` when it runs and keeps no copy: a test that sets one here reaches every place that follows the rule. What
# is not here: limits that are part of the format (``formats/native``), what one kind of storage asks for (``io_backends``), and sizes
# that mean something inside one algorithm only. No value depends on another, unless it says so.

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# ------------------------------------------------------------------------------------------------------- what is stored

CHUNK = 64 * MIB
"""Largest chunk that is written, and largest share of one tensor that one thread reads. A digest, a header entry and a request for each 64
MiB cost nothing beside the bytes; several threads still share one tensor, and two of them (as stored, and decoded) fit every thread's
scratch. The format allows no larger ones (``CHUNK_LIMIT``)."""

UNDIVIDED = 64 * KIB
"""A replicated cell of fewer bytes is written whole by one replica, and a merged block by one of the ranks that hold parts of it: a chunk
for each of a thousand replicas of a bias would cost more in the index than is saved in writing."""

CODED_FILE = 128 * MIB
"""Most bytes, before coding, of the chunks that share a file with coded ones, unless it has a single chunk. They wait in memory until the
file is laid out, for only then it is known what each takes."""

DATA_FILE = 4 * GIB
"""About the size of a data file that conversions write, unless the caller says: few files, and each can be copied again in seconds."""

# --------------------------------------------------------------------------------------------- one call, one step of work

CACHE_BLOCK = MIB
"""Bytes that are copied, hashed and written in one step, alone or as neighbours together: so few that they stay in the second-level cache
from the first of the three to the last."""

PIECE = 2 * MIB
"""Bytes of a long range that are read, or that a rank gives another one of a live state, hashed and copied before the next ones. Twice a
cache block: each read costs a system call and a wake-up, and half of a piece is still in the cache."""

GROUPED_READ = 4 * MIB
"""Neighbouring small ranges are read together up to this many bytes, which still fit the last-level cache when they are hashed and
copied."""

DIRECT_READ = 32 * MIB
"""Bytes that one call reads straight into the memory where they belong. Nothing else touches them, so the cache does not matter: each call
costs as much as 0.5 MiB, and longer ones would only make a deadline be seen later."""

GAP = 32 * KIB
"""Bytes between two ranges that are read rather than skipped: one more call of a local file system takes as long as reading them. Storage
where calls are dearer asks for more (``IOHints.coalesce_gap``)."""

WORTH_A_CALL = 64 * KIB
"""A range of at least so many bytes is read or written by a call of its own; shorter ones go together with their neighbours, since the call
would take longer than the bytes."""

SMALL_COPY = 256 * KIB
"""Less is copied at once, by the thread that is at it, with the interpreter's lock: handing it over takes longer."""

SMALL_SHARED_READ = 256 * KIB
"""Chunks of fewer bytes that the same ranks want are one shared read; and what all other ranks together want less of is not shared: the
messages would cost more than reading it again."""

HASH_BUFFER = 16 * MIB
"""Bytes that a thread reads at once where it does nothing but hash, copy or send them on (verify, cp, import): long enough for storage
behind a network, short enough for dozens of threads."""

VALUE_BLOCK = 4 * MIB
"""Bytes of a tensor that a thread compares, casts or puts in order at once; both sides and the temporaries of numpy fit the cache."""

# ------------------------------------------------------------------------------------------------------ memory in all

SCRATCH = 448 * MIB
"""All threads of a load together have this much for coded chunks; threads that find none left wait. Seven chunks: with fewer threads
decoding, reading no longer keeps up with a local disk."""

CONVERT_MEMORY = GIB
"""Memory for tensors of a conversion, unless the caller says."""

EXPORT_MEMORY = 256 * MIB
"""Memory for windows of an export on each rank, unless the caller says: beside a model in training there is not much."""

LEAST_MEMORY = 32 * MIB
"""The least that a caller may give a conversion or an export. With less, nearly every chunk would be read more than once."""

# ----------------------------------------------------------------- what a reader takes from files that others have made

FOREIGN_TABLE = 256 * MIB
"""A table of contents in another format: an index of Hugging Face, the directory of a ``torch.save`` archive. Two to three million
entries; beyond that it is taken for damage or an attack, before memory is asked for."""

FOREIGN_PICKLE = GIB
"""A pickle that is read: building its objects takes up to some hundred times as much memory."""

SIDE_FILE = 64 * MIB
"""A file beside the weights (a tokenizer, a configuration) that a conversion copies along. A larger one is no such thing."""
