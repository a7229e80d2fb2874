"""What each opcode of a pickle does to the machine: pushes data or stand-ins, and nothing else."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from .machine import Machine
from .opcodes_plain import PLAIN, Handler, decimal, push
from .stand_ins import GlobalName, Made, Persistent

# -------------------------------------------------------------------------------------------------------- containers


def _empty(kind: Callable[[], Any], m: Machine) -> None:
    m.stack.append(kind())


def _tuple(length: int, m: Machine) -> None:
    if len(m.stack) < length:
        m.fail("a tuple of more values than there are")
    m.stack[-length:] = [tuple(m.stack[-length:])]


def _tuple1(m: Machine) -> None:
    m.stack[-1] = (m.stack[-1],)


def _tuple2(m: Machine) -> None:
    last = m.stack.pop()
    m.stack[-1] = (m.stack[-1], last)


def _marked_tuple(m: Machine) -> None:
    items = m.items()
    m.stack.append(tuple(items))


def _marked_list(m: Machine) -> None:
    items = m.items()
    m.stack.append(items)


def _marked_dict(m: Machine) -> None:
    items = m.items()
    m.stack.append({})
    _store(m, items)


def _append(m: Machine) -> None:
    value = m.stack.pop()
    _extend(m, [value])


def _appends(m: Machine) -> None:
    _extend(m, m.items())


def _extend(m: Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is list:
        target.extend(items)
    elif type(target) is Made:
        target.items = _longer(target.items or [], items)
    else:
        m.fail("values are appended to what is no list")


def _longer(there: list[Any], more: list[Any]) -> list[Any]:
    there.extend(more)
    return there


def _setitem(m: Machine) -> None:
    value = m.stack.pop()
    key = m.stack.pop()
    _store(m, [key, value])


def _setitems(m: Machine) -> None:
    _store(m, m.items())


def _store(m: Machine, items: list[Any]) -> None:
    """Put keys and values, one after another, into the dict on top of the stack."""
    target = m.stack[-1]
    if len(items) % 2:
        m.fail("a key without a value")
    keys, values = items[::2], items[1::2]
    for key in keys:
        if type(key) is not str:
            _check_key(m, key)
    if type(target) is Made:
        target.pairs = _longer(target.pairs or [], list(zip(keys, values, strict=True)))
    elif type(target) is dict:
        target.update(zip(keys, values, strict=True))
    else:
        m.fail("items are set in what is no dict")


def _check_key(m: Machine, key: Any) -> None:
    if not m.keys.allow(key):
        m.fail(f"a {type(key).__name__} as a key, or one of too many parts, or too many with one hash")


def _additems(m: Machine) -> None:
    items = m.items()
    for item in items:
        _check_key(m, item)
    target = m.stack[-1]
    if type(target) is set:
        target.update(items)
    else:
        m.fail("values are added to what is no set")


def _frozenset(m: Machine) -> None:
    items = m.items()
    for item in items:
        _check_key(m, item)
    m.stack.append(frozenset(items))


# ------------------------------------------------------------------------------------------------- stack and memo


def _mark(m: Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.items()


def _pop_mark(m: Machine) -> None:
    m.items()


def _dup(m: Machine) -> None:
    m.stack.append(m.stack[-1])


def _put(length: int, m: Machine) -> None:
    m.memo[m.number(length)] = m.stack[-1]


def _put_short(m: Machine) -> None:
    m.memo[m.data[m.at]] = m.stack[-1]
    m.at += 1


def _put_line(m: Machine) -> None:
    m.memo[decimal(m, m.line())] = m.stack[-1]


def _memoize(m: Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _get(length: int, m: Machine) -> None:
    m.stack.append(m.memo[m.number(length)])


def _get_line(m: Machine) -> None:
    m.stack.append(m.memo[decimal(m, m.line())])


def _stop(m: Machine) -> None:
    m.done = True


def _proto(m: Machine) -> None:
    version = m.number(1)
    if version > pickle.HIGHEST_PROTOCOL:
        m.refuse(f"protocol {version}")


def _frame(m: Machine) -> None:
    if m.number(8) > len(m.data) - m.at:
        m.fail("a frame reaches beyond the end")


# ---------------------------------------------------------------------------------- what would run: stand-ins only


def _global(m: Machine) -> None:
    module = m.text_line()
    m.stack.append(m.global_name(module, m.text_line()))


def _stack_global(m: Machine) -> None:
    name = m.stack.pop()
    m.stack.append(m.global_name(m.stack.pop(), name))


def _reduce(m: Machine) -> None:
    args = m.stack.pop()
    m.stack.append(_made(m, m.stack.pop(), args))


def _inst(m: Machine) -> None:
    module = m.text_line()
    of = m.global_name(module, m.text_line())
    args = tuple(m.items())
    m.stack.append(Made(of, args))


def _obj(m: Machine) -> None:
    of, *args = m.items()
    m.stack.append(_made(m, of, tuple(args)))


def _newobj_ex(m: Machine) -> None:
    kwargs = m.stack.pop()
    args = m.stack.pop()
    if type(kwargs) is not dict:
        m.fail("keyword arguments that are no dict")
    made = _made(m, m.stack.pop(), args)
    made.kwargs = kwargs
    m.stack.append(made)


def _made(m: Machine, of: Any, args: Any) -> Made:
    if type(of) not in (GlobalName, Made):
        m.fail(f"a {type(of).__name__} is called")
    if type(args) is not tuple:
        m.fail("the arguments of a call are no tuple")
    return Made(of, args)


def _build(m: Machine) -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is not Made:
        m.fail(f"a {type(target).__name__} is given a state")
    if target.state is not None:
        m.fail("an object is given two states")
    target.state = state


def _persistent(m: Machine) -> None:
    m.stack.append(Persistent(m.stack.pop()))


def _persistent_line(m: Machine) -> None:
    m.stack.append(Persistent(m.text_line()))


def _extension(m: Machine) -> None:
    m.refuse("extension codes of the program that wrote it")


def _buffer(m: Machine) -> None:
    m.refuse("buffers that are kept apart from it")


HANDLERS: dict[int, Handler] = {
    **PLAIN,
    pickle.EMPTY_DICT[0]: partial(_empty, dict),
    pickle.EMPTY_LIST[0]: partial(_empty, list),
    pickle.EMPTY_SET[0]: partial(_empty, set),
    pickle.EMPTY_TUPLE[0]: partial(push, ()),
    pickle.TUPLE1[0]: _tuple1,
    pickle.TUPLE2[0]: _tuple2,
    pickle.TUPLE3[0]: partial(_tuple, 3),
    pickle.TUPLE[0]: _marked_tuple,
    pickle.LIST[0]: _marked_list,
    pickle.DICT[0]: _marked_dict,
    pickle.FROZENSET[0]: _frozenset,
    pickle.APPEND[0]: _append,
    pickle.APPENDS[0]: _appends,
    pickle.SETITEM[0]: _setitem,
    pickle.SETITEMS[0]: _setitems,
    pickle.ADDITEMS[0]: _additems,
    pickle.MARK[0]: _mark,
    pickle.POP[0]: _pop,
    pickle.POP_MARK[0]: _pop_mark,
    pickle.DUP[0]: _dup,
    pickle.PUT[0]: _put_line,
    pickle.BINPUT[0]: _put_short,
    pickle.LONG_BINPUT[0]: partial(_put, 4),
    pickle.MEMOIZE[0]: _memoize,
    pickle.GET[0]: _get_line,
    pickle.BINGET[0]: partial(_get, 1),
    pickle.LONG_BINGET[0]: partial(_get, 4),
    pickle.STOP[0]: _stop,
    pickle.PROTO[0]: _proto,
    pickle.FRAME[0]: _frame,
    pickle.GLOBAL[0]: _global,
    pickle.STACK_GLOBAL[0]: _stack_global,
    pickle.REDUCE[0]: _reduce,
    pickle.NEWOBJ[0]: _reduce,
    pickle.NEWOBJ_EX[0]: _newobj_ex,
    pickle.INST[0]: _inst,
    pickle.OBJ[0]: _obj,
    pickle.BUILD[0]: _build,
    pickle.PERSID[0]: _persistent_line,
    pickle.BINPERSID[0]: _persistent,
    pickle.EXT1[0]: _extension,
    pickle.EXT2[0]: _extension,
    pickle.EXT4[0]: _extension,
    pickle.NEXT_BUFFER[0]: _buffer,
    pickle.READONLY_BUFFER[0]: _buffer,
}
"""Opcode → what it does."""
