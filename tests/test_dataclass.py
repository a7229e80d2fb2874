"""``ckpt.dataclass`` makes classes that behave as those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import pytest

from ckpt.dataclass import dataclass

Maker = Callable[..., Any]


def _classes(make: Maker) -> dict[str, type]:
    @make(frozen=True, kw_only=True, slots=True)
    class Slots:
        """Documented."""

        b: int
        a: list[int] = field(default_factory=list)
        kept: ClassVar[int] = 3
        quiet: str = field(default="q", repr=False, compare=False)
        made: dict[str, int] = field(default_factory=dict, init=False, compare=False)
        cached: int = field(default=0, init=False, repr=False, compare=False)

    @make(frozen=True)
    class Mixed:
        """Documented."""

        a: int
        b: tuple[int, ...] = (1,)
        c: str = field(default="c", kw_only=True)
        d: list[int] = field(kw_only=True, hash=False, default_factory=list)

        def __post_init__(self) -> None:
            if self.a < 0:
                raise ValueError("negative")

    @make(frozen=True, slots=True)
    class One:
        """Documented."""

        a: float

    @make(frozen=True, eq=False)
    class Identity:
        """Documented."""

        a: int = 1

    @make(frozen=True)
    class Own:
        """Documented."""

        a: int

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "own"

        def __hash__(self) -> int:
            return 7

    @make(frozen=True)
    class Nothing:
        """Documented."""

    @make(slots=True)
    class Open:
        """Documented."""

        a: int
        b: int = 2

    return {cls.__name__: cls for cls in (Slots, Mixed, One, Identity, Own, Nothing, Open)}


OURS, THEIRS = _classes(dataclass), _classes(dataclasses.dataclass)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Slots", (), {"b": 1}),
    ("Slots", (), {"b": 1, "a": [4], "quiet": "z"}),
    ("Slots", (), {}),
    ("Slots", (1,), {}),
    ("Mixed", (1,), {}),
    ("Mixed", (1, (2, 3)), {"c": "x", "d": [1]}),
    ("Mixed", (-1,), {}),
    ("Mixed", (1,), {"e": 1}),
    ("One", (float("nan"),), {}),
    ("One", (1.5,), {}),
    ("Identity", (), {}),
    ("Own", (1,), {}),
    ("Nothing", (), {}),
    ("Open", (1,), {"b": 3}),
]


def _result(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (AttributeError, TypeError, ValueError) as err:
        return type(err), str(err)


@pytest.mark.parametrize(("name", "args", "options"), CALLS)
def test_an_object_behaves_as_one_of_the_standard_library(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    def behaviour(cls: Any) -> list[Any]:
        one, two = (_result(lambda: cls(*args, **copy.deepcopy(options))) for _ in range(2))
        if isinstance(one, tuple):
            return [one]
        first = next(iter(fields(cls)), None)
        found = [
            repr(one),
            one == one,
            one == two,
            one == 3,
            one != two,
            _result(lambda: hash(one) == hash(two)),
            _result(lambda: dir(one)),
        ]
        found += [repr(replace(one)), repr(copy.copy(one)), repr(copy.deepcopy(one))]
        if first is not None:
            found += [_result(lambda: setattr(one, first.name, 5)), _result(lambda: delattr(one, first.name))]
        if hasattr(one, "__dict__"):  # with slots, Python 3.11 says nonsense
            found += [_result(lambda: setattr(one, "other", 5)), _result(lambda: delattr(one, "other"))]
        return found

    ours, theirs = behaviour(OURS[name]), behaviour(THEIRS[name])
    assert ours == theirs


@pytest.mark.parametrize("name", OURS)
def test_a_class_says_the_same_of_itself(name: str) -> None:
    def facts(cls: Any) -> list[Any]:
        init = cls.__init__
        return [
            *(
                inspect.signature(cls),
                cls.__match_args__,
                cls.__doc__,
                cls.__qualname__,
                init.__qualname__,
                init.__module__,
                get_type_hints(init),
            ),
            [(f.name, f.type, f.init, f.kw_only) for f in fields(cls)],
            (cls.__dataclass_params__.frozen, hasattr(cls, "__dict__"), cls.__hash__ is None),
        ]

    ours, theirs = facts(OURS[name]), facts(THEIRS[name])
    assert (str(ours[0]), ours[1:]) == (str(theirs[0]), theirs[1:])


@dataclass(frozen=True, slots=True)
class Sent:
    a: int
    b: Any = None


@dataclasses.dataclass(frozen=True)
class Derived(Sent):
    c: int = 3


def test_frozen_slots_are_pickled_and_derived_from() -> None:
    assert pickle.loads(pickle.dumps(Sent(1, [2]))) == Sent(1, [2])
    assert pickle.loads(pickle.dumps(Derived(1, 2, 4))) == Derived(1, 2, 4) != Sent(1, 2)
    assert repr(Derived(1)) == "Derived(a=1, b=None, c=3)"
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'a'"):
        Derived(1).a = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        dataclasses.dataclass(type("Open", (Sent,), {"__annotations__": {}}))
    loop: list[Any] = []
    loop.append(Sent(1, loop))
    assert repr(loop) == "[Sent(a=1, b=[...])]"


def test_what_a_first_save_and_load_compile(tmp_path: Path) -> None:
    """A process pays for the classes and patterns that they bring in before its first save returns."""
    code = f"""
import sys
compiled = []
sys.addaudithook(lambda event, given: compiled.append(given) if event == "compile" and given[1] == "<string>" else None)
import ckpt
ckpt.save({str(tmp_path / "one")!r}, {{"a": 1}})
ckpt.load({str(tmp_path / "one")!r}, {{"a": 0}})
print(len(compiled))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 650
