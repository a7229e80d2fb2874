"""Which stored tensor goes to which wanted one: renames, globs, enclosing modules, shapes, dtypes and padding. Pure. All problems are
found, not only the first."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ckpt.catalog import TensorEntry
from ckpt.dtypes import DType
from ckpt.errors import UsageError

from .ownership import TensorSpec


def several(globs: str | Sequence[str]) -> tuple[str, ...]:
    """Globs as callers give them: one may come by itself."""
    given = (globs,) if isinstance(globs, str) else tuple(globs) if isinstance(globs, Iterable) else None
    if given is None or not all(isinstance(glob, str) for glob in given):
        raise UsageError(f"globs of names are text, or a list of texts, not {globs!r}")
    return given


def globs_of_only(only: str | Sequence[str] | None) -> tuple[str, ...]:
    """The globs of ``only=``, none if everything is meant."""
    if only is None:
        return ()
    try:
        globs = several(only)
    except UsageError:
        globs = ()
    if not globs or "" in globs:  # of an empty name, or of a list that came out empty, everything may be meant, or nothing
        raise UsageError(f"only= takes globs of names, not {only!r}", hint='only="*lora*", several in a list, or None for everything')
    return globs


def rules_of_rename(rename: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """The rules of ``rename=``, in order."""
    rules = tuple(rename.items()) if isinstance(rename, Mapping) else () if rename is None else None
    if rules is None or not all(isinstance(name, str) for rule in rules for name in rule):
        raise UsageError(
            f"rename= takes a dict of names or globs, not {rename!r}", hint='rename={"model.*": "net.*"}, the checkpoint\'s name first'
        )
    return rules


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What part of a checkpoint is meant, and under which names.

    ``only``: globs; names that match none are left alone on both sides. ``rename``: name or glob in the checkpoint → name or glob in the
    state; one ``*`` on each side stands for the same text, and the first rule that matches a name decides. ``then``: rules that move what
    these give, not asked for by the caller.
    """

    only: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    then: tuple[tuple[str, str], ...] = ()
    trainable: bool = False
    """Parameters that training does not change are left alone."""

    def __post_init__(self) -> None:
        for old, new in self.rename:
            if old.count("*") != new.count("*") or old.count("*") > 1:
                raise UsageError(f"rename {old!r} → {new!r}: each side needs one *, or none")

    def followed_by(self, renames: Iterable[tuple[str, str]]) -> Selection:
        """The same with renames of the names that its own give."""
        more = tuple(rule for rule in renames if rule not in self.then)
        return replace(self, then=(*self.then, *more)) if more else self

    @property
    def moves(self) -> bool:
        """Whether anything may have another name in the state."""
        return bool(self.rename or self.then)

    def idle(self, stored: Sequence[str], wanted: Iterable[str]) -> list[str]:
        """Patterns that no name fits, with the names nearest to each: ``stored`` are the checkpoint's names and paths, ``wanted`` names of
        the state."""
        here = {*wanted, *map(self.renamed, stored)}
        unused = [(glob, "only", here) for glob in self.only if not any(fnmatchcase(name, glob) for name in here)]
        unused += [(old, "rename", set(stored)) for old, _ in self.rename if not any(fits(old, name) for name in stored)]
        return [f"{what}: {pattern!r}{_near(pattern, names)}" for pattern, what, names in unused]

    def wants(self, name: str) -> bool:
        return not self.only or any(fnmatchcase(name, glob) for glob in self.only)

    def renamed(self, stored: str) -> str:
        """The name in the state of what the checkpoint calls ``stored``."""
        name = stored
        for rules in (self.rename, self.then):
            for old, new in rules:
                if fits(old, name):
                    head, star, tail = old.partition("*")
                    name = new.replace("*", name[len(head) : len(name) - len(tail)]) if star else new + name[len(old) :]
                    break
        return name

    def view(self, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Stored tensors by their names in the state."""
        if not self.moves:
            return dict(entries)
        view: dict[str, TensorEntry] = {}
        for stored, entry in entries.items():
            name = self.renamed(stored)
            if name in view:
                raise UsageError(f"the renames make {view[name].name!r} and {stored!r} both {name!r}", hint="rename them apart")
            view[name] = entry
        return view


def _near(pattern: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(pattern, list(names), 2, 0.5)
    return f" (near it: {', '.join(near)})" if near else ""


def fits(pattern: str, name: str) -> bool:
    """Whether a name is what a side of a rename means: itself and the tensors that it is made of, or with one ``*`` for any text."""
    head, star, tail = pattern.partition("*")
    return (
        name == pattern or name.startswith(f"{pattern}#")
        if not star
        else len(name) >= len(head) + len(tail) and name.startswith(head) and name.endswith(tail)
    )


def misfit(wanted: TensorSpec, entry: TensorEntry, *, cast: bool) -> str | None:
    """Why a stored tensor cannot be loaded into a wanted one, or None if it can."""
    if entry.dtype is not wanted.dtype and entry.dtype != wanted.dtype:
        if not cast:
            return f"dtype {entry.dtype.name} in the checkpoint, {wanted.dtype.name} in the state (cast=True converts)"
        if not castable(entry.dtype, wanted.dtype):
            return f"dtype {entry.dtype.name} in the checkpoint cannot be converted to {wanted.dtype.name}"
    if entry.shape == wanted.shape and (wanted.logical is None or entry.logical is None):
        return None
    mine = wanted.logical or wanted.shape
    stored = entry.logical or entry.shape
    if mine == stored:
        return None
    padded = " without padding" if wanted.logical or entry.logical else ""
    return f"shape {list(stored)} in the checkpoint, {list(mine)} in the state{padded}"


def ways_out(*, missing: bool, unexpected: bool, texts: Sequence[str], ranks: int) -> str:
    """What a caller may do about a checkpoint that does not fit: the hint for what was found.

    ``texts`` are those of :func:`misfit` and its like.
    """
    shapes = [tuple(map(_numbers, match.groups())) for text in texts if (match := _SHAPES.search(text))]
    # One entry for each way out that the API has, and whether the problem at hand has anything to do with it: a hint
    # that lists all of them would be read by nobody.
    parts = any(
        ranks > 1 or (len(mine) == len(stored) and all(m and not s % m for m, s in zip(mine, stored, strict=True)))
        for stored, mine in shapes
    )
    others = bool(shapes) and not parts
    ways = {
        "give the model the stored shapes, which `ckpt inspect` shows": others,
        "rename={...} maps names": missing,
        "only=[...] loads a part": missing or unexpected or others,
        "strict=False leaves missing and unexpected names alone": missing or unexpected,
        "cast=True converts dtypes": any("(cast=True converts)" in text for text in texts),
        "layout= says which parts of larger tensors plain ones are (docs/layouts.md)": parts,
        "give the module the stored shape first: module.load_state_dict({name: ckpt.open(url)[path].read(), ...})": any(
            "of its own, which is not called" in text for text in texts
        ),
        "wrap a value in ckpt.PerRank on both sides or on neither": any("a PerRank" in text for text in texts),
    }
    given = [way for way, helps in ways.items() if helps]
    return "; ".join(given) or "`ckpt inspect` shows what is stored; only=[...] leaves out what does not fit"


_SHAPES = re.compile(r"shape \[([\d, ]*)\] in the checkpoint, \[([\d, ]*)\] in the state")


def _numbers(listed: str) -> tuple[int, ...]:
    return tuple(int(n) for n in listed.split(",") if n)


def castable(stored: DType, wanted: DType) -> bool:
    """Whether a load can convert: torch has no arithmetic of packed float4, and complex numbers would lose their imaginary part."""
    # float4 is stored two elements to a byte, and torch has no kernels that unpack it.
    packed = "float4" in stored.name + wanted.name
    return not packed and not (stored.name.startswith("complex") and not wanted.name.startswith("complex"))


def report_names(title: str, names: Iterable[str], limit: int = 20) -> list[str]:
    """Lines of a message."""
    listed: Sequence[str] = sorted(names)
    if not listed:
        return []
    more = [f"    and {len(listed) - limit} more"] if len(listed) > limit else []
    return [f"  {title} ({len(listed)}):", *[f"    {n}" for n in listed[:limit]], *more]


# Which module the names of parameters lack, where one software names them in the whole state and another within their module. Pure.
#
#     names in the state       model.layers.0.weight     what ``ckpt.save`` writes, and ``ckpt.load`` asks for
#     names in the module            layers.0.weight     what ``get_optimizer_state_dict`` of torch and plain ``state_dict`` write
#
# A path fits if, put in front of a name in the module, it gives a name in the state:
#
#     in the state {m.0.w, m.1.0.w}, in the module {0.w, 1.0.w}:    m explains both,   m.1 explains 0.w alone   →  m
#     in the state {model.w, ema.w}, in the module {w}:             model explains w,  ema explains it as well  →  nobody knows


@dataclass(frozen=True, kw_only=True, slots=True)
class EnclosingModule:
    """``path`` of a module, and the names in the module that it explains; ``rivals``: other paths explain some of these too."""

    path: str
    explained: Set[str]
    rivals: bool


def enclosing_module(inner: Collection[str], outer: Collection[str]) -> EnclosingModule | None:
    """The module of the names ``inner``, by the names ``outer`` of the whole state. None if no path fits, if two fit and none of them
    explains all that the other one does and more, or if a name needs nothing in front.

    A caller decides what has to be explained in full: with ``rivals`` a path that leaves names unexplained is a guess.
    """
    inner = frozenset(inner)
    if not inner or not inner.isdisjoint(outer):
        return None
    explained: dict[str, set[str]] = {}
    for name in outer:
        at = name.find(".")
        while at >= 0:
            if name[at + 1 :] in inner:
                explained.setdefault(name[:at], set()).add(name[at + 1 :])
            at = name.find(".", at + 1)
    best = max(explained, key=lambda path: len(explained[path]), default=None)
    if best is None or any(path != best and not names < explained[best] for path, names in explained.items()):
        return None
    return EnclosingModule(path=best, explained=explained[best], rivals=len(explained) > 1)
