"""Translations between naming conventions of a model: ``huggingface``, ``megatron``, ``plain``. Rules are data, and strict both ways.

A translation is a TOML file (docs/formats.md)::

    left = "huggingface"
    right = "megatron"
    left_ignores = ["*.rotary_emb.inv_freq"]

    [[term]]
    left = ["model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"]
    right = "decoder.layers.{layer}.mlp.linear_fc1.weight"
    steps = [{ concat = 0 }]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.resources import files
from itertools import product
from typing import Any, Literal, get_args

from ckpt.errors import NamesError, UsageError
from ckpt.plan.match import report_names
from ckpt.plan.views import LogicalTensor, whole

from .terms import Dimensions, Kind, MatchedTensor, Patterns, Term, TermStep, name_of

# Numbers of a model that translations need, from its configuration: transformers' ``config.json`` or Megatron-LM's arguments.

PARTS = {"query_rows": ("heads", "head_size"), "key_rows": ("query_groups", "head_size")}
"""Numbers that are products of two others."""
NUMBERS = ("heads", "query_groups", "head_size", *PARTS, "vocabulary", "padded_vocabulary", "layers", "experts")


def of_config(config: Mapping[str, Any]) -> Dimensions:
    """From a transformers configuration, read as JSON. A number that it does not have is left out."""
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads")
    numbers = {
        "heads": heads,
        "query_groups": text.get("num_key_value_heads", heads),
        "head_size": text.get("head_dim") or _divided(text.get("hidden_size"), heads),
        "vocabulary": text.get("vocab_size"),
        "layers": text.get("num_hidden_layers"),
        "experts": next((text[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(k)), None),
    }
    return completed(numbers)


def of_arguments(arguments: Mapping[str, Any]) -> Dimensions:
    """From Megatron-LM's ``args``, as its checkpoints have them (megatron/training/arguments.py)."""
    heads = arguments.get("num_attention_heads")
    groups = arguments.get("num_query_groups") if arguments.get("group_query_attention", True) else heads
    numbers = {
        "heads": heads,
        "query_groups": groups or heads,
        "head_size": arguments.get("kv_channels") or _divided(arguments.get("hidden_size"), heads),
        "vocabulary": arguments.get("vocab_size") or arguments.get("padded_vocab_size"),
        "padded_vocabulary": arguments.get("padded_vocab_size"),
        "layers": arguments.get("num_layers"),
        "experts": arguments.get("num_experts"),
    }
    return completed(numbers)


def padded_vocabulary(vocabulary: int, *, divisor: int = 128, tensor_parallel: int = 1) -> int:
    """Rows of the embedding as Megatron-LM makes them divisible (``make_vocab_size_divisible_by``, core/tokenizers/utils)."""
    step = divisor * tensor_parallel
    return -(-vocabulary // step) * step


def changed(stored: Mapping[str, int], given: Mapping[str, int]) -> Dimensions:
    """Numbers that the files tell, with those that somebody says instead, and what follows from all of them."""
    kept = {name: value for name, value in stored.items() if not given.keys() & set(PARTS.get(name, ()))}
    return completed({**kept, **given})


def completed(partial: Mapping[str, int | None]) -> Dimensions:
    """With the numbers that follow from these."""
    numbers = Dimensions({name: value for name, value in partial.items() if value is not None})
    for name, (count, size) in PARTS.items():
        if count in numbers and size in numbers:
            numbers.setdefault(name, numbers[count] * numbers[size])
    if "vocabulary" in numbers:
        numbers.setdefault("padded_vocabulary", numbers["vocabulary"])
    return numbers


def _divided(size: int | None, parts: int | None) -> int | None:
    return size // parts if size and parts else None


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Direction = Literal["rightwards", "leftwards"]


@dataclass(frozen=True, kw_only=True)
class TranslationRules:
    """``left`` and ``right`` are names of conventions; names that fit a glob of ``left_ignores`` or ``right_ignores`` are left out. With
    ``keeps_others`` names that no term takes are the same on both sides."""

    left: str
    right: str
    terms: tuple[Term, ...]
    left_ignores: tuple[str, ...] = ()
    right_ignores: tuple[str, ...] = ()
    keeps_others: bool = False

    def views(
        self, shapes: Mapping[str, Sequence[int]], direction: Direction, numbers: Mapping[str, int] | None = None, *, partial: bool = False
    ) -> dict[str, LogicalTensor]:
        """The tensors of the other side as views of these: ``shapes`` has all tensors of one side by name.

        ``numbers`` are those of the model that the terms name. ``partial``: not all of the model is there, so a term may find nothing.
        """
        matched, others = self._matched(shapes, direction, partial=partial)
        known = Dimensions(numbers or {})
        lost = [] if partial else list(self._lost(matched, shapes, direction, known))
        if lost:
            raise NamesError(
                "\n".join(["the model is not whole:", *lost[:20]]), hint="a file may be missing; --set layers=… if it has fewer"
            )
        self._check_numbers([term for term, names in zip(self.terms, matched, strict=True) if names], direction, known)
        made = {name: whole(name, shapes[name]) for name in others}
        faults: list[str] = []
        for term, names in zip(self.terms, matched, strict=True):
            try:
                results = getattr(term, direction)(names, lambda name: shapes[name], known)
            except UsageError as err:
                faults.append(str(err))
                continue
            faults += [_twice(name, made[name], result) for name, result in results.items() if name in made]
            made.update(results)
        if faults:
            raise UsageError("\n".join([f"{len(faults)} tensors cannot be translated:", *faults[:20]]))
        return made

    def knows(self, name: str, direction: Direction) -> bool:
        """Whether a term takes a name of the side that ``direction`` leads from."""
        return bool((self._left_patterns if direction == "rightwards" else self._right_patterns).find(name))

    def _matched(
        self, shapes: Mapping[str, Sequence[int]], direction: Direction, *, partial: bool
    ) -> tuple[list[dict[str, MatchedTensor]], list[str]]:
        """For each term the names that fit it; and the names that stay as they are."""
        rightwards = direction == "rightwards"
        ignored = self.left_ignores if rightwards else self.right_ignores
        patterns = self._left_patterns if rightwards else self._right_patterns
        matched: list[dict[str, MatchedTensor]] = [{} for _ in self.terms]
        strange = []
        for name in shapes:
            hits = [(i, f) for i, f in patterns.find(name) if not rightwards or self.terms[i].takes(f, shapes)]
            if len(hits) > 1:
                raise UsageError(
                    f"{name!r} fits {' and '.join(repr(str(self.terms[i])) for i, _ in hits)}", hint="make the terms exclusive"
                )
            if hits:
                matched[hits[0][0]][name] = hits[0][1]
            elif not any(fnmatchcase(name, glob) for glob in ignored):
                strange.append(name)
        idle = [] if partial else [str(term) for term, names in zip(self.terms, matched, strict=True) if not names and not term.optional]
        if idle or (strange and not self.keeps_others):
            raise self._misfit([] if self.keeps_others else strange, idle, direction)
        return matched, strange

    def _lost(
        self, matched: Sequence[Mapping[str, MatchedTensor]], shapes: Mapping[str, Sequence[int]], direction: Direction, known: Dimensions
    ) -> Iterator[str]:
        """What lacks layers that the model has, or experts."""
        rows = [(t, [dict(f.numbers) for f in names.values()]) for t, names in zip(self.terms, matched, strict=True) if not t.optional]
        seen = {numbers["layer"] for _, of_term in rows for numbers in of_term if "layer" in numbers}
        layers = set(range(known["layers"])) if "layers" in known else seen
        for term, of_term in rows:
            if not any("layer" in numbers for numbers in of_term) or (term.beside is not None and direction == "leftwards"):
                continue
            wanted = {n for n in layers if term.beside is None or name_of(term.beside, {"layer": n}) in shapes}
            lost = sorted(wanted - {numbers["layer"] for numbers in of_term})
            if lost:
                yield f"  {term} is not there for layers {lost[:8]}{' and more' * (len(lost) > 8)}"
            for layer in sorted(wanted) if "experts" in known and any("expert" in numbers for numbers in of_term) else ():
                have = {numbers["expert"] for numbers in of_term if numbers["layer"] == layer}
                if layer not in lost and have != set(range(known["experts"])):
                    yield f"  {term} is there for {len(have)} of {known['experts']} experts of layer {layer}"

    def asks(self) -> set[str]:
        """Names of the numbers that its terms take, whichever way."""
        return {number for term in self.terms for step in term.steps for way in (True, False) for number in step.asks(rightwards=way)}

    def _check_numbers(self, terms: Sequence[Term], direction: Direction, known: Dimensions) -> None:
        """All that is lacking in one message, each as what a model's configuration calls it."""
        asked = {n for term in terms for step in term.steps for n in step.asks(rightwards=direction == "rightwards")} - set(known)
        lacking = sorted({part for number in asked for part in PARTS.get(number, (number,))} - set(known))
        if lacking:
            given = " ".join(f"--set {number}=…" for number in lacking)
            config = "; or put the model's config.json beside the checkpoint's files" if {*lacking} <= {*NUMBERS} else ""
            raise UsageError(
                f"the translation needs numbers of the model that are not given: {', '.join(lacking)}",
                hint=f"give them: {given} (numbers= in Python){config}",
            )

    def _misfit(self, strange: Sequence[str], idle: Sequence[str], direction: Direction) -> NamesError:
        sides = (self.left, self.right) if direction == "rightwards" else (self.right, self.left)
        lines = [f"these tensors are no {sides[0]} model that can be told in {sides[1]}"]
        lines += report_names("tensors that match no term", strange) + report_names("terms that match no tensor", idle)
        back: Direction = "leftwards" if direction == "rightwards" else "rightwards"
        if strange and all(self.knows(name, back) for name in strange):
            hint = f"they have the names of {sides[1]} already: leave out --names, or --convention {sides[0]} for the other way"
        else:
            hint = "choose another translation, or extend this one (docs/formats.md)"
        return NamesError("\n".join(lines), hint=hint)

    @cached_property
    def _left_patterns(self) -> Patterns:
        return Patterns((p, i, place) for i, term in enumerate(self.terms) for place, p in enumerate(term.left))

    @cached_property
    def _right_patterns(self) -> Patterns:
        return Patterns((term.right, i, 0) for i, term in enumerate(self.terms))


def _twice(name: str, one: LogicalTensor, other: LogicalTensor) -> str:
    sources = (", ".join(dict.fromkeys(piece.source for piece in view.pieces)) for view in (one, other))
    return f"{name!r} would be there twice: " + ", and ".join(f"{source} → {name}" for source in sources)


# ------------------------------------------------------------------------------------------------------------- reading

_BUILTIN = files("ckpt.converters.mapping") / "names"
"""Translations that come with the package, one TOML file each (docs/formats.md)."""


def builtin() -> list[str]:
    """Names of the translations that come with this package."""
    return sorted(f.name.removesuffix(".toml") for f in _BUILTIN.iterdir() if f.name.endswith(".toml"))


def load_translation(source: str) -> TranslationRules:
    """A translation that comes with this package, by its name, or one in a TOML file, by its path."""
    if source.endswith(".toml"):
        try:
            with open(source, encoding="utf-8") as file:
                return parse_translation(file.read(), source)
        except OSError as err:
            raise UsageError(f"the translation cannot be read: {err}", where=source) from err
    if source not in builtin():
        raise UsageError(f"there is no translation {source!r}", hint=f"one of {', '.join(builtin())}, or the path of a .toml file")
    return parse_translation((_BUILTIN / f"{source}.toml").read_text(encoding="utf-8"), source)


def parse_translation(text: str, where: str) -> TranslationRules:
    """A translation from TOML."""
    try:
        data = tomllib.loads(text)
        terms = [term for row in data.pop("term", []) for term in _terms(row)]
        known = {f.name for f in fields(TranslationRules)} - {"terms"}
        if {"left", "right"} - set(data) or set(data) - known:
            raise UsageError(f"it needs left and right, and may have {', '.join(sorted(known - {'left', 'right'}))} and terms")
        ignored = {k: tuple(data[k]) for k in ("left_ignores", "right_ignores") if k in data}
        return TranslationRules(
            left=data["left"], right=data["right"], terms=tuple(terms), keeps_others=data.get("keeps_others", False), **ignored
        )
    except tomllib.TOMLDecodeError as err:
        raise UsageError(f"this is not TOML: {err}", where=where) from err
    except UsageError as err:
        raise UsageError(err.message, where=where, hint=err.hint) from err


def _terms(row: dict[str, Any]) -> list[Term]:
    """The terms of one row: one for each choice among the words of ``each``, such as ``each = {kind = ["weight", "bias"]}``."""
    strange = set(row) - {"left", "right", "steps", "optional", "each", "beside"}
    if strange or "left" not in row or "right" not in row:
        raise UsageError(
            f"a term needs left and right, and may have steps, optional, beside and each; this one has {', '.join(sorted(row))}"
        )
    left = [row["left"]] if isinstance(row["left"], str) else row["left"]
    steps = tuple(_step(dict(s)) for s in row.get("steps", []))
    each = row.get("each", {})
    terms = []
    for words in product(*each.values()):
        chosen = dict(zip(each, words, strict=True))
        spelt = [_filled(p, chosen) for p in [*left, row["right"]]]
        beside = _filled(row["beside"], chosen) if "beside" in row else None
        terms.append(Term(left=tuple(spelt[:-1]), right=spelt[-1], steps=steps, optional=row.get("optional", False), beside=beside))
    return terms


def _filled(pattern: str, words: Mapping[str, str]) -> str:
    for name, word in words.items():
        pattern = pattern.replace(f"{{{name}}}", word)
    return pattern


def _step(row: dict[str, Any]) -> TermStep:
    """``{concat = 0}``, ``{stack = 0, over = "expert"}``, ``{transpose = [1, 0]}``, ``{pad = 0, real = "vocabulary", to = "padded"}``."""
    kinds = [k for k in get_args(Kind) if k in row]
    strange = set(row) - set(get_args(Kind)) - {f.name for f in fields(TermStep)}
    if len(kinds) != 1 or strange:
        raise UsageError(f"a step is one of {', '.join(get_args(Kind))} with its options, not {row}")
    kind: Kind = kinds[0]
    at = row.pop(kind)
    if kind == "transpose":
        return TermStep(kind=kind, order=tuple(at))
    if "sizes" in row:
        row["sizes"] = tuple(row["sizes"])
    return TermStep(kind=kind, axis=at, **row)
