"""Reads a pickle as data: Python's own ``pickle._Unpickler``, with everything that could run code replaced by stand-ins.

Invariants: nothing that the pickle names is imported, looked up or called; memory and time grow with the length of the pickle, and with
nothing that it claims; whatever the bytes are, the outcome is a value, a CorruptError or a FormatError.

The value is made of None, bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, ``GlobalName``, ``Persistent`` and
``Made``. It may contain itself, and be nested to any depth: whoever walks it has to count.
"""

# Why this is safe, opcode by opcode:
#
#     pushes of plain data, stack, memo      inherited. They move values that the pickle has, and make containers of them.
#     GLOBAL STACK_GLOBAL INST EXT*          a name becomes a ``GlobalName``: two texts. Extension codes are refused.
#     REDUCE NEWOBJ* OBJ INST BUILD          a call becomes a ``Made``: what would be called, with which arguments and state.
#     SETITEM* DICT ADDITEMS FROZENSET       a value becomes a key only if it hashes quickly and collides with few (``Keys``).
#     APPEND*                                only lists and ``Made`` grow: nothing is asked for a method by name.
#     BYTEARRAY8 FRAME LONG4                 a length is compared with what is left before anything is made of that size.
#     INT LONG                               decimal digits take quadratic time: at most 4,300.
#     PUT GET                                at most 10 digits: of longer numbers any number have one hash, and the memo is a dict.
#
# OPCODES names each inherited handler, so one that a later Python adds is "no opcode" here until somebody has looked at it. Stand-ins
# cannot be called and have no ``__new__`` that takes them: an inherited handler that tried to run one would only fail.
#
# A read that runs into the end gives fewer bytes than it was asked for, as a file does. That needs no check of its own: what comes next
# is the end, where STOP should have been, and that is an error.

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any, NoReturn

from ckpt import settings
from ckpt.errors import CkptError, CorruptError, FormatError

from .stand_ins import GlobalName, Keys, Made, Persistent

MAX_NAME = 512
"""Characters of a module's or a class's name."""
MAX_DIGITS = 4300
"""Decimal digits of an integer, as in Python itself: longer ones take quadratic time."""
MAX_MEMO_DIGITS = 10
"""Decimal digits of a place in the memo: LONG_BINPUT knows no more of them."""
_STOP, _MEMOIZE = pickle.STOP, pickle.MEMOIZE
_MAX_LONG = 1786  # bytes of the largest such integer
_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Python 2 names of modules."""
_FAILURES = (
    *(pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError),
    *(ValueError, TypeError, OverflowError, RecursionError, struct.error),
    DeprecationWarning,  # of an escape that Python does not know, where warnings are errors
)
"""What the handlers raise for bytes that no pickler writes."""


def load_pickle(data: bytes, where: str) -> Any:
    """The value of a pickle, with stand-ins for all that is not plain data."""
    if len(data) > settings.FOREIGN_PICKLE:
        raise FormatError(f"a pickle of {len(data):,} bytes is longer than the {settings.FOREIGN_PICKLE:,} that are read", where=where)
    unpickler = InertUnpickler(data, where)
    try:
        return unpickler.load()
    except CkptError:
        raise
    except _FAILURES as err:
        unpickler.fail(f"{type(err).__name__}: {err}", err)


class InertUnpickler(pickle._Unpickler):
    """Reads one pickle. The attributes without an underscore are those that the inherited handlers use."""

    def __init__(self, data: bytes, where: str) -> None:
        self._data = data
        self._where = where
        self._file = io.BytesIO(data)
        super().__init__(self._file)
        self.read = self._file.read
        self.readline = self._file.readline
        self.memo: dict[int, Any] = {}
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        self._keys = Keys()
        self._globals: dict[tuple[str, str], GlobalName] = {}

    def load(self) -> Any:
        """Everything up to STOP. What comes after it is not looked at."""
        read, memo, opcodes = self.read, self.memo, OPCODES
        while (code := read(1)) != _STOP:
            if code == _MEMOIZE:  # the most common one by far: a third of those of DCP's metadata
                memo[len(memo)] = self.stack[-1]
                continue
            handler = opcodes.get(code)
            if handler is None:
                self.fail(f"no opcode has the number {code[0]}" if code else "it ends too early")
            handler(self)
        if len(self.stack) != 1 or self.metastack:
            self.fail("it ends with more or less than one value")
        return self.stack[0]

    def fail(self, what: str, cause: BaseException | None = None) -> NoReturn:
        raise CorruptError(
            f"this is not a pickle that can be read: {what}, at byte {self._file.tell():,}",
            where=self._where,
            hint="the file is damaged, or was made to do harm: get it again from where it was written",
        ) from cause

    def _refuse(self, what: str) -> NoReturn:
        raise FormatError(f"the pickle needs {what}", where=self._where, hint="save it again with `torch.save` or protocol 2 of pickle")

    def pop_mark(self) -> list[Any]:
        """All that was pushed since the last mark, which goes."""
        items = self.stack
        self.stack = self.metastack.pop()
        self.append = self.stack.append
        return items

    # ---- what would run: stand-ins only

    def find_class(self, module: str, name: str) -> GlobalName:
        known = self._globals.get((module, name))
        if known is None:
            if not 0 < len(name) <= MAX_NAME or len(module) > MAX_NAME:
                self.fail("the name of a class or function is no name")
            if not (module + name).isprintable():
                self.fail("the name of a class or function cannot be printed")
            known = self._globals[module, name] = GlobalName(_MODULES.get(module, module), name)
        return known

    def get_extension(self, code: int) -> NoReturn:
        self._refuse("extension codes of the program that wrote it")

    def persistent_load(self, pid: Any) -> Persistent:
        return Persistent(pid)

    def _instantiate(self, of: Any, args: list[Any]) -> None:
        self.append(self._made(of, tuple(args)))

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self.append(self._made(self.stack.pop(), args))

    def load_newobj_ex(self) -> None:
        kwargs = self.stack.pop()
        args = self.stack.pop()
        if type(kwargs) is not dict:
            self.fail("keyword arguments that are no dict")
        made = self._made(self.stack.pop(), args)
        made.kwargs = kwargs
        self.append(made)

    def _made(self, of: Any, args: Any) -> Made:
        if type(of) not in (GlobalName, Made):
            self.fail(f"a {type(of).__name__} is called")
        if type(args) is not tuple:
            self.fail("the arguments of a call are no tuple")
        return Made(of, args)

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is not Made:
            self.fail(f"a {type(target).__name__} is given a state")
        if target.state is not None:
            self.fail("an object is given two states")
        target.state = state

    # ---- containers

    def load_append(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is Made:
            target.items = target.items or []
            target.items.extend(items)
        else:
            self.fail("values are appended to what is no list")

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._store(items)

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._store([key, value])

    def load_setitems(self) -> None:
        self._store(self.pop_mark())

    def _store(self, items: list[Any]) -> None:
        """Put keys and values, one after another, into the dict on top of the stack."""
        target = self.stack[-1]
        if len(items) % 2:
            self.fail("a key without a value")
        keys, values = items[::2], items[1::2]
        self._check_keys(keys)
        if type(target) is Made:
            target.pairs = target.pairs or []
            target.pairs.extend(zip(keys, values, strict=True))
        elif type(target) is dict:
            target.update(zip(keys, values, strict=True))
        else:
            self.fail("items are set in what is no dict")

    def load_additems(self) -> None:
        items = self.pop_mark()
        self._check_keys(items)
        target = self.stack[-1]
        if type(target) is set:
            target.update(items)
        else:
            self.fail("values are added to what is no set")

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        self._check_keys(items)
        self.append(frozenset(items))

    def _check_keys(self, keys: list[Any]) -> None:
        for key in keys:
            if type(key) is not str and not self._keys.allow(key):
                self.fail(f"a {type(key).__name__} as a key, or one of too many parts, or too many with one hash")

    # ---- lengths that the pickle claims

    def load_proto(self) -> None:
        version = self.read(1)[0]
        if version > pickle.HIGHEST_PROTOCOL:
            self._refuse(f"protocol {version}")

    def load_frame(self) -> None:
        """A frame is only a hint how much to read at once."""
        self._left(int.from_bytes(self.read(8), "little"))

    def load_long4(self) -> None:
        length = int.from_bytes(self.read(4), "little")
        if length > _MAX_LONG:
            self.fail(f"an integer of {length:,} bytes")
        self.append(int.from_bytes(self.read(length), "little", signed=True))

    def load_bytearray8(self) -> None:
        self.append(bytearray(self.read(self._left(int.from_bytes(self.read(8), "little")))))

    def _left(self, length: int) -> int:
        left = len(self._data) - self._file.tell()
        if length > left:
            self.fail(f"{length:,} bytes are announced and {left:,} are left")
        return length

    def load_buffer(self) -> NoReturn:
        self._refuse("buffers that are kept apart from it")

    def check_digits(self, most: int) -> None:
        """The rest of the line is a number of at most so many digits."""
        at = self._file.tell()
        if self._data.find(b"\n", at, at + most + 3) < 0:  # with a sign and the L of Python 2
            self.fail(f"an integer of more than {most:,} digits")

    def _decode_string(self, value: bytes) -> str | bytes:
        """A ``str`` of Python 2: text, or bytes if it is none."""
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value


Handler = Callable[[InertUnpickler], None]


def _inherited(names: str) -> dict[bytes, Handler]:
    table: dict[int, Any] = pickle._Unpickler.dispatch
    return {(code := getattr(pickle, name)): table[code[0]] for name in names.split()}


def _of_few_digits(names: str, most: int) -> dict[bytes, Handler]:
    def checked(handler: Handler) -> Handler:
        def check_and_read(unpickler: InertUnpickler) -> None:
            unpickler.check_digits(most)
            handler(unpickler)

        return check_and_read

    return {code: checked(handler) for code, handler in _inherited(names).items()}


OPCODES: dict[bytes, Handler] = {
    **_inherited("NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 FLOAT BINFLOAT"),
    **_of_few_digits("INT LONG", MAX_DIGITS),
    **_of_few_digits("PUT GET", MAX_MEMO_DIGITS),
    **_inherited("STRING BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8"),
    **_inherited("SHORT_BINBYTES BINBYTES BINBYTES8"),
    **_inherited("EMPTY_DICT EMPTY_LIST EMPTY_SET EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 LIST"),
    **_inherited("MARK POP POP_MARK DUP BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET"),
    **_inherited("GLOBAL STACK_GLOBAL INST OBJ EXT1 EXT2 EXT4 PERSID BINPERSID"),  # through the methods above
    pickle.DICT: InertUnpickler.load_dict,
    pickle.FROZENSET: InertUnpickler.load_frozenset,
    pickle.APPEND: InertUnpickler.load_append,
    pickle.APPENDS: InertUnpickler.load_appends,
    pickle.SETITEM: InertUnpickler.load_setitem,
    pickle.SETITEMS: InertUnpickler.load_setitems,
    pickle.ADDITEMS: InertUnpickler.load_additems,
    pickle.REDUCE: InertUnpickler.load_reduce,
    pickle.NEWOBJ: InertUnpickler.load_reduce,
    pickle.NEWOBJ_EX: InertUnpickler.load_newobj_ex,
    pickle.BUILD: InertUnpickler.load_build,
    pickle.PROTO: InertUnpickler.load_proto,
    pickle.FRAME: InertUnpickler.load_frame,
    pickle.LONG4: InertUnpickler.load_long4,
    pickle.BYTEARRAY8: InertUnpickler.load_bytearray8,
    pickle.NEXT_BUFFER: InertUnpickler.load_buffer,
    pickle.READONLY_BUFFER: InertUnpickler.load_buffer,
}
"""Opcode → what it does; STOP ends the loop."""
