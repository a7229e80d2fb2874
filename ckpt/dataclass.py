"""``dataclass`` of the standard library, quicker to define: the first save of a process defines 150, and there each compiles up to seven
functions. Here a frozen class compiles ``__init__`` alone. All else is closures that do the same; the fields are the library's.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")


class _New:
    """The default of a parameter whose field has a factory."""

    def __repr__(self) -> str:
        return "<factory>"


def _quick(*, frozen: bool = False, eq: bool = True, repr: bool = True, init: bool = True, **options: Any) -> Callable[[type[T]], type[T]]:
    def define(cls: type[T]) -> type[T]:
        own = set(vars(cls)) - ({"__hash__"} if cls.__hash__ is None else set())  # a class with __eq__ of its own has no hash of its own
        if options.get("order") or any(dataclasses.is_dataclass(base) for base in cls.__mro__[1:]):
            return dataclasses.dataclass(frozen=frozen, eq=eq, repr=repr, init=init, **options)(cls)
        hashed = frozen and eq and "__hash__" not in own
        made = dataclasses.dataclass(eq=eq, unsafe_hash=hashed, repr=False, init=init and not frozen, **options)(cls)
        methods: list[Callable[..., Any]] = [_repr(made)] if repr else []
        if frozen:
            made.__dataclass_params__.frozen = True  # type: ignore[attr-defined]  # what derives from it is frozen, too
            methods += [*_frozen(made), *([_init(made)] if init and "__init__" not in own else ())]
            methods += _pickled() if options.get("slots") else ()
        for method in methods:
            if method.__name__ not in own:
                method.__qualname__ = f"{cls.__qualname__}.{method.__name__}"
                setattr(made, method.__name__, method)
        return made

    return define


def _init(cls: Any) -> Callable[..., None]:
    fields = dataclasses.fields(cls)
    names: dict[str, Any] = {"_set": object.__setattr__, "_new": _New()}
    parameters: dict[bool, list[str]] = {False: ["self"], True: []}
    body = ["  pass"]
    for field in fields:
        name = value = field.name
        default = ""
        if field.default_factory is not dataclasses.MISSING:
            names[f"_make_{name}"], default = field.default_factory, "=_new"
            value = f"_make_{name}() if {name} is _new else {name}" if field.init else f"_make_{name}()"
        elif field.default is not dataclasses.MISSING:
            names[f"_default_{name}"], default = field.default, f"=_default_{name}"
            value = name if field.init else f"_default_{name}"
        if field.init:
            parameters[bool(field.kw_only)].append(name + default)
        if field.init or default:
            body.append(f"  _set(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("  self.__post_init__()")
    keywords = ["*", *parameters[True]] if parameters[True] else []
    init = f" def __init__({', '.join(parameters[False] + keywords)}):\n" + "\n".join(body)
    made: dict[str, Any] = {}
    exec(f"def of({', '.join(names)}):\n{init}\n return __init__", vars(sys.modules[cls.__module__]), made)  # whose names annotations have
    method: Callable[..., None] = made["of"](**names)
    method.__annotations__ = {**{field.name: field.type for field in fields if field.init}, "return": None}
    return method


def _frozen(cls: Any) -> tuple[Callable[..., None], ...]:
    names = frozenset(field.name for field in dataclasses.fields(cls))

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return __setattr__, __delattr__


def _repr(cls: Any) -> Callable[[Any], str]:
    names = [field.name for field in dataclasses.fields(cls) if field.repr]

    @recursive_repr()
    def __repr__(self: Any) -> str:
        return f"{self.__class__.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return __repr__


def _pickled() -> tuple[Callable[..., Any], ...]:
    def __getstate__(self: Any) -> list[Any]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def __setstate__(self: Any, state: list[Any]) -> None:
        for field, value in zip(dataclasses.fields(self), state, strict=True):
            object.__setattr__(self, field.name, value)

    return __getstate__, __setstate__


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # what type checkers know
else:
    dataclass = _quick
