"""JSON nodes → nested Python state. No pickle: a node is of a known kind, or an error."""

from __future__ import annotations

import base64
import enum
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar, TypeAlias

from ckpt.dtypes import DTYPES
from ckpt.errors import FormatError
from ckpt.needs import require_torch

# What a node is, and how to look at one without reading its values. A *path* is the text that ``join`` makes of the keys on the way to a
# value; it is also how tensors get their names.

Node: TypeAlias = Any
"""A JSON value: None, bool, int, float, str, list of nodes, dict of str to node."""

REFERENCES = frozenset({"$tensor", "$inline", "$tensors", "$param_groups", "$per_rank"})
"""Kinds of node whose values are kept elsewhere or name tensors: ``leaf`` makes them, ``special`` reads them."""

OF_TORCH = frozenset({"$size", "$dtype", "$device"})
"""Kinds of node whose values are torch's."""

SCALARS = frozenset((int, float, str, bool, type(None)))
"""Types of nodes that stand for themselves and have nothing below them. A state may have millions, so walks look for these first."""

MAX_DEPTH = 100
"""Containers may be nested this deep."""

NUMPY = frozenset(d.numpy for d in DTYPES.values() if d.numpy is not None)

TORCH_ONLY = frozenset(
    {"quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
)
"""Names that a ``$dtype`` may have beside those of ``DTYPES``: dtypes of torch that no stored tensor has."""


class Missing(enum.Enum):
    """The type of ``MISSING``."""

    MISSING = "missing"


MISSING = Missing.MISSING
"""What ``find`` returns when nothing is there; None is a node."""


def text(node: Node) -> str:
    """The canonical JSON text of a node: compact, keys sorted. Equal texts mean equal nodes, whatever the order of their keys."""
    return json.dumps(node, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


def shorten(node: Node, limit: int = 80) -> str:
    """The canonical text cut to at most ``limit`` characters, for messages."""
    full = text(node)
    return full if len(full) <= limit else full[: limit - 1] + "…"


def child_path(path: str, key: Node) -> str:
    end = key if isinstance(key, str) else text(key)
    return f"{path}.{end}" if path else end


def at(path: str) -> str:
    return f"the value at {path!r}" if path else "the state"


def mapping_node(pairs: Sequence[tuple[Node, Node]]) -> Node:
    for key, _ in pairs:
        if not isinstance(key, str) or key[:1] == "$":
            return {"$map": [list(pair) for pair in pairs]}
    return dict(pairs)


def tag_of(node: Node) -> str | None:
    """The kind of a typed node, with its ``$``."""
    if not isinstance(node, dict):
        return None
    key: str
    for key in node:  # a mapping may have many thousand
        if key[:1] == "$":
            return key
    return None


def pairs_of(node: Node) -> list[tuple[Node, Node]] | None:
    """Key and value nodes of a mapping, plain or not; None for other nodes."""
    if not isinstance(node, dict):
        return None
    tag = tag_of(node)
    if tag is None:
        return list(node.items())
    return [(k, v) for k, v in node[tag]] if tag == "$map" else None


def items_of(node: Node) -> list[Node] | None:
    """The elements of a list or tuple node; None for other nodes."""
    if isinstance(node, list):
        return node
    return node["$tuple"] if tag_of(node) == "$tuple" else None


def refers(node: Node, kinds: Set[str] = REFERENCES) -> bool:
    """Whether a node of one of ``kinds`` lies in it."""
    if type(node) in SCALARS:
        return False
    if tag_of(node) in kinds:
        return True
    below = items_of(node)
    if below is None:
        below = [v for _, v in pairs_of(node) or ()]
    return any(refers(n, kinds) for n in below if type(n) not in SCALARS)


Special: TypeAlias = Callable[[str, Any], object]
"""Asked for the value of a node of a kind in ``REFERENCES``: the kind (with its ``$``) and the payload."""


def decode(node: Node, special: Special) -> object:
    """Turn a node back into the value it stands for. ``special(kind, payload)`` gives the values of the kinds in ``REFERENCES``."""
    return _Decoder(special).value(node, "")


def check(node: Node) -> None:
    """Raise what :func:`decode` would, without making values and without torch."""
    _Checker().value(node, "")


class _Decoder:
    def __init__(self, special: Special) -> None:
        self.special = special

    def value(self, node: Node, path: str) -> object:
        if isinstance(node, list):
            return self.items(node, path)
        if not isinstance(node, dict):
            return node
        tag = tag_of(node)
        if tag is None:
            return {k: v if type(v) in SCALARS else self.value(v, child_path(path, k)) for k, v in node.items()}
        if len(node) != 1:
            raise FormatError(f"{at(path)} mixes {tag!r} with other keys", hint=HINT)
        if tag in REFERENCES:
            return self.special(tag, node[tag])
        return self.nested(tag, node[tag], path) if tag in _NESTED else self.typed(tag, node[tag], path)

    def typed(self, tag: str, payload: Any, path: str) -> object:
        read = _READERS.get(tag)
        if read is None:
            raise FormatError(f"{at(path)} is of unknown kind {tag!r}", hint=HINT)
        try:
            return read(payload)
        except ModuleNotFoundError:
            require_torch(at(path))
            raise
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError) as e:
            raise _malformed(tag, path) from e

    def items(self, nodes: Sequence[Node], path: str) -> list[object]:
        return [n if type(n) in SCALARS else self.value(n, child_path(path, i)) for i, n in enumerate(nodes)]

    def nested(self, tag: str, payload: Any, path: str) -> object:
        if not isinstance(payload, list):
            raise _malformed(tag, path)
        if tag == "$map":
            return self.map(payload, path)
        items = self.items(payload, path)
        if tag == "$complex":
            parts = [x for x in items if isinstance(x, (int, float)) and not isinstance(x, bool)]
            if len(items) != 2 or len(parts) != 2:
                raise _malformed(tag, path)
            return complex(*parts)
        if tag == "$tuple":
            return tuple(items)
        try:
            return set(items) if tag == "$set" else frozenset(items)
        except TypeError as e:
            raise _malformed(tag, path) from e

    def map(self, payload: list[Any], path: str) -> dict[object, object]:
        entries: dict[object, object] = {}
        for pair in payload:
            if not isinstance(pair, list) or len(pair) != 2:
                raise _malformed("$map", path)
            key, stored = pair
            if type(key) not in SCALARS:
                key = self.value(key, child_path(path, "(key)"))
            try:
                if key in entries:
                    raise FormatError(f"{at(path)} has the key {shorten(pair[0])} twice", hint=HINT)
            except TypeError as e:
                raise _malformed("$map", path) from e
            entries[key] = stored if type(stored) in SCALARS else self.value(stored, child_path(path, pair[0]))
        return entries


HINT = "the state was written by newer or other software, or is damaged: run `ckpt verify`"
_DEVICE = re.compile(r"[a-z][a-z0-9_]*(?::(?:0|[1-9][0-9]*))?")
_NESTED = frozenset({"$map", "$tuple", "$set", "$frozenset", "$complex"})


def _malformed(tag: str, path: str) -> FormatError:
    return FormatError(f"{at(path)} is not a well-formed {tag} node", hint=HINT)


def _read_bytes(payload: Any) -> bytes:
    return base64.b64decode(payload, validate=True)


def _read_array(payload: Any) -> Any:
    import numpy as np

    name, shape, raw = payload
    if name not in NUMPY:
        raise ValueError(name)
    dtype = np.dtype(name)
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(shape)
    return np.frombuffer(_read_bytes(raw), dtype=dtype.newbyteorder("<")).reshape(shape).astype(dtype)


def _read_scalar(payload: Any) -> object:
    name, raw = payload
    return _read_array([name, [], raw])[()]


def _checked_size(payload: Any) -> tuple[int, ...]:
    if not isinstance(payload, list) or not all(type(n) is int and -(2**63) <= n < 2**63 for n in payload):
        raise ValueError(payload)
    return tuple(payload)


def _checked_dtype(payload: Any) -> str:
    if payload not in DTYPES and payload not in TORCH_ONLY:
        raise ValueError(payload)
    return str(payload)


def _checked_device(payload: Any) -> str:
    if not isinstance(payload, str) or _DEVICE.fullmatch(payload) is None:
        raise ValueError(payload)
    return payload


def _read_size(payload: Any) -> object:
    sizes = _checked_size(payload)
    import torch

    return torch.Size(sizes)


def _read_dtype(payload: Any) -> object:
    name = _checked_dtype(payload)
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"torch {torch.__version__} has no dtype {name}", hint="read it with a newer torch")
    return dtype


def _read_device(payload: Any) -> object:
    text = _checked_device(payload)
    import torch

    try:
        return torch.device(text)
    except RuntimeError as e:
        raise FormatError(f"this torch knows no device {text!r}", hint="import the package that brings the device, then read again") from e


_READERS: dict[str, Callable[[Any], object]] = {
    "$bytes": _read_bytes,
    "$bytesio": lambda payload: io.BytesIO(_read_bytes(payload)),
    "$float": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__,
    "$scalar": _read_scalar,
    "$array": _read_array,
    "$size": _read_size,
    "$dtype": _read_dtype,
    "$device": _read_device,
}


class _Checker(_Decoder):
    """Walks as the decoder does; where that would need torch, or give a reference's value, it only looks at the payload."""

    _WITHOUT_TORCH: ClassVar[Mapping[str, Callable[[Any], object]]] = {
        "$size": _checked_size,
        "$dtype": _checked_dtype,
        "$device": _checked_device,
    }

    def __init__(self) -> None:
        super().__init__(self.reference)

    def typed(self, tag: str, payload: Any, path: str) -> object:
        read = self._WITHOUT_TORCH.get(tag)
        if read is None:
            return super().typed(tag, payload, path)
        try:
            return tag, read(payload)
        except (TypeError, ValueError) as e:
            raise _malformed(tag, path) from e

    def reference(self, kind: str, payload: Any) -> None:
        if kind == "$param_groups":
            for group in payload:
                self.value(group["options"], "")
