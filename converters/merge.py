"""Weighted averages of checkpoints: one checkpoint whose floating-point tensors are the sum of weights times those of several.

It is a conversion of one of them, from which values such as the step come, where tensors are computed from all. So formats, translations,
windows, the journal, several processes and progress are those of ``convert``.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ckpt import units
from ckpt.errors import MismatchError, NamesError, NotFoundError, ShapeError, UsageError
from ckpt.formats.native.paths import step_number
from ckpt.formats.registry import open_catalog
from ckpt.plan.layout.geometry import Box
from ckpt.plan.match import several
from ckpt.runs.step_listing import list_steps
from ckpt.settings import check_flags
from ckpt.telemetry.progress import ProgressCallback
from ckpt.text import url_text

from .conversion import Conversion
from .convert import ConvertReport, Part, files_beside, run
from .selected_state import optimizer_tensors
from .selection import FLOATING, Computed, OutputSet, OutputTensor, check_globs, is_floating, operand
from .target import ConvertOptions, MergeKeywords, target

if TYPE_CHECKING:
    from typing_extensions import Unpack


# Formulas of an average: the weighted sum of floating-point tensors, and tensors that have to be the same in all checkpoints.

# One element of the result, from the elements x of the checkpoints in the order of the arguments, all arithmetic in float32 (in float64
# if an operand or the result is float64), rounded after every step, no fused multiply-add:
#
#     acc = w[0] * x[0];   acc = acc + w[1] * x[1];   acc = acc + w[2] * x[2];  …   then cast to the result's dtype
#
# Each step is one elementwise operation of IEEE arithmetic, so neither the cut into blocks nor the number of threads changes a bit, and it
# is what torch computes step by step. numpy does it, since an operation on a block this small takes half as long there; torch casts. Blocks
# stay in the cache from the first step to the last.


_BLOCK = 1 << 17
"""Elements at once: two temporaries in float32 are 1 MiB. Smaller blocks spend their time between operations."""
_CAST = (1 << 15) - 64
"""Elements that torch casts at once: fewer than it divides among threads of its own (32,768). These would spin on the cores that read, hash
and write meanwhile."""
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}
"""All bits of the exponent: in NaN and infinite numbers, and in no others, all of them are set."""

_SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedSum:
    """The sum of ``weights[i]`` times operand i. ``sources`` name the checkpoints in errors. Unless ``allow_nan``, all must be finite."""

    weights: tuple[float, ...]
    sources: tuple[str, ...]
    allow_nan: bool = False

    def boxes(self, box: Box) -> Sequence[Box]:
        return [box] * len(self.weights)

    def compute(self, name: str, box: Box, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        flat, result = [x.reshape(-1) for x in operands], out.view(-1)
        wide = torch.float64 if torch.float64 in {out.dtype, *(x.dtype for x in operands)} else torch.float32
        total, term = torch.empty(2, min(_BLOCK, len(result)), dtype=wide).numpy()
        factors = [term.dtype.type(weight) for weight in self.weights]
        numbers, bits = [_numbers(x, wide) for x in flat], _bits(result)  # arrays: cutting a tensor takes ten times as long
        summed = result.numpy() if out.dtype == wide else None
        with np.errstate(all="ignore"):  # what is not finite is looked for below
            for start in range(0, len(result), _BLOCK):
                at = slice(start, min(start + _BLOCK, len(result)))
                acc = total[: at.stop - start] if summed is None else summed[at]
                _add_up([x[at] for x in numbers], factors, acc, term[: len(acc)])
                if summed is None:
                    _cast(torch.from_numpy(acc), result[at])
                if not self.allow_nan and not _is_finite(result, bits, acc, at):
                    self._refuse(name, box, start, [x[at] for x in flat], result[at])

    def _refuse(self, name: str, box: Box, start: int, operands: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """Name the first element that is not finite; there may be none, since what is just above the largest number rounds down to it."""
        for x, source in zip(operands, self.sources, strict=True):
            if (bad := _first(~torch.isfinite(x))) is not None:
                message = f"{place(name, box, start + bad)} is {x[bad].item()}"
                raise MismatchError(
                    message, where=source, hint="leave this checkpoint out, or let the result be so: --allow-nan (allow_nan=True)"
                )
        if (bad := _first(~torch.isfinite(result))) is not None:
            message = f"{place(name, box, start + bad)} of the average is {result[bad].item()}: too large for {str(result.dtype)[6:]}"
            raise MismatchError(message, hint="use smaller weights, or another --dtype")


def _numbers(x: torch.Tensor, wide: torch.dtype) -> Numbers | torch.Tensor:
    """As ``_add_up`` takes an operand: an array of its numbers, of the bits of bfloat16 for float32; or the tensor."""
    if x.dtype == wide:
        array: Numbers = x.numpy()
        return array
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 and wide == torch.float32 else x


def _add_up(parts: Sequence[Numbers | torch.Tensor], factors: Sequence[Any], total: Numbers, term: Numbers) -> None:
    """The weighted sum of one block in ``total``; ``term`` is overwritten."""
    for i, (part, factor) in enumerate(zip(parts, factors, strict=True)):
        target = term if i else total
        np.multiply(_widened(part, target), factor, out=target)
        if i:
            np.add(total, term, out=total)


def _widened(part: Numbers | torch.Tensor, into: Numbers) -> Numbers:
    """The same numbers as wider ones: as they are, or in ``into``."""
    if isinstance(part, torch.Tensor):
        _cast(part, torch.from_numpy(into))
    elif part.dtype == into.dtype:
        return part
    else:  # bfloat16 is the upper half of a float32; shifting is faster than torch's cast. NumPy 1 would shift 16 bits without ``dtype``.
        np.left_shift(part, 16, out=into.view(np.uint32), dtype=np.uint32)
    return into


def _cast(source: torch.Tensor, into: torch.Tensor) -> None:
    for start in range(0, len(into), _CAST):
        into[start : start + _CAST].copy_(source[start : start + _CAST])


def _bits(result: torch.Tensor) -> Numbers | None:
    """The bits of a result as signed integers; None for numbers of 8 bits: some have no infinite ones."""
    bits: Numbers | None = result.view(_SIGNED[result.element_size()]).numpy() if result.dtype in _EXPONENTS else None
    return bits


def _is_finite(result: torch.Tensor, bits: Numbers | None, acc: Numbers, at: slice) -> bool:
    """Whether all of a block of ``result`` is finite; ``acc`` is what was rounded to it."""
    if bits is None:
        largest = torch.finfo(result.dtype).max
        low, high = acc.min(), acc.max()
        return bool(-largest <= low and high <= largest)  # neither if one is NaN
    # The bits of what is not finite are the largest: as signed integers of what is positive, as unsigned ones of what is negative.
    block, mask = bits[at], _EXPONENTS[result.dtype]
    return int(block.max()) < mask and int(block.view(f"u{block.itemsize}").max()) < mask | 1 << 8 * block.itemsize - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SameInAll:
    """The first operand; every other one must have the same bits. ``sources`` name the checkpoints in errors."""

    sources: tuple[str, ...]

    def boxes(self, box: Box) -> Sequence[Box]:
        return [box] * len(self.sources)

    def compute(self, name: str, box: Box, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        first = operands[0]
        out.view(-1).view(torch.uint8).copy_(bits := first.reshape(-1).view(torch.uint8))
        for other, source in zip(operands[1:], self.sources[1:], strict=True):
            if (differs := _first(bits != other.reshape(-1).view(torch.uint8))) is not None:
                bad = differs // first.element_size()
                values = f"{_shown(first, bad)} in {self.sources[0]} and {_shown(other, bad)} in {source}"
                message = f"{place(name, box, bad)} is {values}, and {str(first.dtype)[6:]} tensors are not averaged"
                raise MismatchError(message, hint="take it as it is from one checkpoint (--copy GLOB), or leave it out (--exclude GLOB)")


def place(name: str, box: Box, number: int) -> str:
    """Element ``number`` of a box, in row-major order, as ``name[3, 5]``."""
    index = [int(i) + o for i, o in zip(np.unravel_index(number, box.shape), box.offset, strict=True)] if box.shape else []
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def _first(wrong: torch.Tensor) -> int | None:
    return int(torch.argmax(wrong.to(torch.uint8))) if bool(wrong.any()) else None


def _shown(tensor: torch.Tensor, number: int) -> str:
    return str(tensor.reshape(-1)[number].item())


# The weights of an average: given ones, equal ones, or those of a schedule. Pure.

# A schedule gives checkpoints, oldest first, the weights that make their average the model that a decay of the learning rate would have
# made (Tian et al., "WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging for LLM Pre-training", arXiv 2507.17634). The updates
# between n checkpoints are g_1 … g_{n-1}, so theta_j = theta_0 + g_1 + … + g_j, and
#
#     sum of c_j * theta_j  =  theta_0 + sum of w_i * g_i        with w_i = c_i + … + c_{n-1}
#
# An update keeps the share w_i of its length, as under a decayed learning rate. With the decay d, from d(0) = 1 down to d(1) = 0, that is
# w_i = d(i / n), and so
#
#     c_j = d(j / n) - d((j + 1) / n)         j = 0 (oldest) … n - 1 (newest)


SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: (1.0 + math.cos(math.pi * t)) / 2.0,
    "sqrt": lambda t: 1.0 - math.sqrt(t),
}
"""Name of a schedule → the decay d(t) that its weights stand for. ``linear`` gives equal weights."""

TOLERANCE = 1e-6
"""How far from 1 the sum of weights may be: what is left of decimal fractions of seven digits."""


def schedule_weights(schedule: str, count: int) -> tuple[float, ...]:
    """The weights of ``count`` checkpoints, oldest first. They are positive, and their sum is 1."""
    decay = SCHEDULES.get(schedule)
    if decay is None:
        raise UsageError(f"no schedule {schedule!r}", hint=f"one of {', '.join(SCHEDULES)}")
    if schedule == "linear":  # its differences are equal, but for rounding
        return (1.0 / count,) * count
    return tuple(decay(j / count) - decay((j + 1) / count) for j in range(count))


def checked_weights(weights: Sequence[float] | None, schedule: str | None, count: int, *, any_sum: bool) -> tuple[float, ...]:
    """The weights of ``count`` checkpoints: the given ones, those of a schedule, or equal ones."""
    if weights is None:
        return schedule_weights("linear" if schedule is None else schedule, count)
    if schedule is not None:
        raise UsageError("a schedule gives the weights itself", hint="give either weights or a schedule")
    given: object = weights
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(f"weights= are numbers, not {weights!r}", hint="weights=[0.25, 0.75]")
    if len(weights) != count:
        what = f"{units.plural(len(weights), 'weight')} for {units.plural(count, 'checkpoint')}"
        raise UsageError(what, hint="one weight for each, in the same order")
    if not all(map(math.isfinite, weights)):
        raise UsageError(f"weights are finite numbers, not {', '.join(map(str, weights))}")
    total = math.fsum(weights)
    if abs(total - 1.0) > TOLERANCE and not any_sum:
        hint = "fractions such as 1/3,1/3,1/3 are exact; --any-sum (any_sum=True) takes the weights as they are"
        raise UsageError(f"the weights sum to {total:g}, not to 1", hint=hint)
    return tuple(map(float, weights))


_NAMED = 3
"""Names of tensors that an error lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeReport:
    """What a merge did, or with ``dry_run`` would do. Counts are of tensors of the result."""

    sources: tuple[str, ...]
    weights: tuple[float, ...]
    """One for each source, in their order, which is that of the sum."""
    values_from: str
    """The source of everything that is not averaged."""
    averaged: int
    compared: int
    """Tensors of other dtypes, which are the same in all sources."""
    copied: int
    """Tensors as they are in ``values_from``: of ``copy``, of single ranks, and single numbers of an optimizer."""
    written: ConvertReport

    def __str__(self) -> str:
        return f"averaged {units.plural(self.averaged, 'tensor')} of {units.plural(len(self.sources), 'checkpoint')}; {self.written}"


def merge(
    url: str | os.PathLike[str],
    sources: Sequence[str | os.PathLike[str]],
    *,
    weights: Sequence[float] | None = None,
    schedule: str | None = None,
    any_sum: bool = False,
    values_from: int = 0,
    copy: Sequence[str] = (),
    allow_nan: bool = False,
    to: str = "native",
    part: Part | None = None,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
    **options: Unpack[MergeKeywords],
) -> MergeReport:
    """Write the weighted average of the checkpoints ``sources`` at ``url``, in the format ``to``: ``native``, ``hf``, ``torch`` or ``dcp``.

    Sources have any formats and layouts, and the same tensors. Floating-point tensors are averaged in float32 (float64 ones in float64),
    added in the order of the sources, and cast back to their dtype. Tensors of other dtypes must be the same in all sources. Everything
    else comes from one source. Optimizers are left out unless asked for. If a merge was killed, the same call resumes it.

    Args:
        weights: one for each source; equal ones by default.
        schedule: ``linear``, ``cosine`` or ``sqrt``: weights that stand for such a decay of the learning rate (``SCHEDULES``
            has the formulas). Sources are then in the order of training, the oldest first.
        any_sum: take weights whose sum is not 1.
        values_from: number of the source of all values that are not averaged tensors: step, options, random number generators.
        copy: globs of tensors that come from this source too, instead of being averaged or compared.
        allow_nan: let elements that are NaN or infinite make the result so. By default they are an error.
        part, dry_run, progress: see ``convert``.
        options: of ``convert``: ``views``, ``only``, ``exclude``, ``skip``, ``root``, ``dtype``, ``config``, ``shard_size``, ``memory``,
            ``threads``, ``overwrite``, ``verify``. ``optimizer``: average the state of optimizers too (False by default).

    Raises:
        UsageError: fewer than two sources, or weights and options do not fit.
        NamesError, ShapeError: the sources do not have the same names, shapes or dtypes.
        MismatchError: an element is NaN or infinite, or tensors that cannot be averaged differ. Nothing is left at ``url``.
        Others as for ``convert``.
    """
    check_flags(any_sum=any_sum, allow_nan=allow_nan)
    began, url, urls = time.monotonic(), url_text(url), _checked_sources(sources, values_from, ordered=schedule is not None)
    shares = checked_weights(weights, schedule, len(urls), any_sum=any_sum)
    options.setdefault("optimizer", False)
    asked, format = ConvertOptions(**options), target(to)
    beside = files_beside(format, url, asked)
    chosen = [format.choose(open_catalog(source), asked) for source in urls]
    averaging = WeightedSum(weights=shares, sources=urls, allow_nan=allow_nan)
    result, counts = merged(chosen, averaging, values_from=values_from, copy=several(copy))
    written = run(
        Conversion(format, result, url, asked, beside=beside),
        source=urls[values_from],
        part=part,
        progress=progress,
        dry_run=dry_run,
        began=began,
    )
    return MergeReport(sources=urls, weights=shares, values_from=urls[values_from], written=written, **counts)


def _checked_sources(sources: Sequence[str | os.PathLike[str]], values_from: int, *, ordered: bool) -> tuple[str, ...]:
    """The URLs of the sources, which have to be several, the oldest first if they are ``ordered``."""
    if isinstance(sources, str | os.PathLike):
        raise UsageError(f"sources is one URL, {url_text(sources)!r}", hint="give a list; `ckpt merge --last N` takes the newest of a run")
    urls = tuple(url_text(source) for source in sources)
    if len(urls) < 2:
        raise UsageError(
            f"an average is of at least two checkpoints, not {len(urls)}",
            hint="name more, or --last N for the newest of a run; `ckpt convert` writes a single one",
        )
    if not isinstance(values_from, int) or not 0 <= values_from < len(urls):
        raise UsageError(f"values_from={values_from!r}, of {len(urls)}", hint="count from 0")
    # Names of sources may say that a later one is older.
    steps = [(step_number(url.rstrip("/").rpartition("/")[2]), url) for url in urls]
    for (earlier, first), (later, second) in pairwise((number, url) for number, url in steps if number is not None):
        if ordered and later <= earlier:
            raise UsageError(f"{second} comes after {first}, and is not newer", hint="a schedule takes the oldest checkpoint first")
    return urls


def last_steps(run_url: str | os.PathLike[str], count: int) -> tuple[str, ...]:
    """URLs of the newest ``count`` committed checkpoints of a run, the oldest first, without those that it has abandoned."""
    steps = [step for step in list_steps(run_url) if step.committed and step.abandoned is None]
    if count < 2:
        raise UsageError(f"--last {count}: an average is of at least two checkpoints")
    if len(steps) < count:
        hint = "`ckpt ls` lists them" if steps else "check the URL: it is that of the run, in which the steps are"
        there = f"there {'is' if len(steps) == 1 else 'are'} {units.plural(len(steps), 'committed checkpoint')}"
        raise NotFoundError(f"{there}, not the {count} of --last", where=url_text(run_url), hint=hint)
    return tuple(step.url for step in steps[-count:])


def merged(
    chosen: Sequence[OutputSet], averaging: WeightedSum, *, values_from: int, copy: Sequence[str]
) -> tuple[OutputSet, Mapping[str, int]]:
    """One choice whose tensors are averages of those of several, and how many are ``averaged``, ``compared`` and ``copied``."""
    base = chosen[values_from]
    check_globs(copy, base.tensors, base.catalog.url)
    states = optimizer_tensors(base.catalog)
    own = {name for name, wanted in base.tensors.items() if _is_value(wanted, states, copy)}
    names = base.tensors.keys() - own
    for other in chosen:
        _check_names(base, other, names, own)
    order = [values_from, *(i for i in range(len(chosen)) if i != values_from)]  # operands name catalogs by number: 0 has the values
    numbers = {i: number for number, i in enumerate(order)}
    same = SameInAll(sources=averaging.sources)
    tensors, averaged, compared = dict[str, OutputTensor](), 0, 0
    for name, wanted in base.tensors.items():
        if name in own or not wanted.view.pieces:
            tensors[name] = wanted if wanted.alias is None or wanted.alias in own else replace(wanted, alias=None)
            continue
        alike = [one.tensors[name] for one in chosen]
        floating = wanted.dtype.name in FLOATING and all(is_floating(o.catalog, w.view) for o, w in zip(chosen, alike, strict=True))
        operands = tuple(operand(one.catalog, numbers[i], w.view) for i, (one, w) in enumerate(zip(chosen, alike, strict=True)))
        if not floating:  # compared as it is written, not as it is stored
            operands = tuple(replace(one, dtype=w.dtype) for one, w in zip(operands, alike, strict=True))
        alias = wanted.alias if wanted.alias not in own and all(w.alias == wanted.alias for w in alike) else None
        tensors[name] = replace(wanted, alias=alias, computed=Computed(formula=averaging if floating else same, operands=operands))
        averaged, compared = averaged + floating, compared + (not floating)
    result = replace(base, tensors=tensors, others=tuple(chosen[i].catalog for i in order[1:]))
    return result, {"averaged": averaged, "compared": compared, "copied": len(own)}


def _is_value(wanted: OutputTensor, states: frozenset[str], copy: Sequence[str]) -> bool:
    """Whether a tensor is not averaged but comes from one source, like a value: of one rank, an optimizer's step, or asked for."""
    step = not wanted.shape and any(piece.source in states for piece in wanted.view.pieces)
    return wanted.rank is not None or step or any(fnmatchcase(wanted.name, glob) for glob in copy)


def _check_names(base: OutputSet, other: OutputSet, names: set[str], own: set[str]) -> None:
    """Raise unless the other has the tensors of these names, with the same shapes and dtypes, and no others but ``own`` and those of
    ranks."""
    lacking = sorted(names - other.tensors.keys())
    further = sorted(n for n, w in other.tensors.items() if n not in names and n not in own and w.rank is None)
    for count, here, there in ((lacking, base, other), (further, other, base)):
        if count:
            listed = ", ".join(count[:_NAMED]) + (f" and {len(count) - _NAMED} more" if len(count) > _NAMED else "")
            hint = "leave such tensors out (--only, --exclude), or translate names (--names); with --to hf the model's names alone count"
            raise NamesError(f"{there.catalog.url} does not have {listed}", where=here.catalog.url, hint=hint)
    for name in sorted(names):
        mine, its = base.tensors[name], other.tensors[name]
        shapes = [list(w.logical or w.shape) for w in (mine, its)]
        if shapes[0] != shapes[1]:
            message = f"{name} has the shape {shapes[1]}, and {shapes[0]} in {base.catalog.url}"
            raise ShapeError(message, where=other.catalog.url, hint="only checkpoints of one model have an average")
        if mine.dtype != its.dtype:
            message = f"{name} has the dtype {its.dtype.name}, and {mine.dtype.name} in {base.catalog.url}"
            raise ShapeError(message, where=other.catalog.url, hint="name the dtype of the result: --dtype (dtype=)")
