"""The one table of dtypes: our name (torch's own spelling), bytes per element, and how safetensors stores it (docs/format.md §7)."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import FormatError


@dataclass(frozen=True, kw_only=True, slots=True)
class DType:
    """A dtype. ``itemsize`` is in bytes, ``numpy`` is the numpy name or None, ``align`` orders chunks in a data file."""

    name: str
    itemsize: int
    safetensors: str
    numpy: str | None = None

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a safetensors entry that holds elements of ``shape``."""
        if self.safetensors == "F4":
            return (*shape[:-1], shape[-1] * 2) if shape else (2,)
        if self.safetensors == "U8" and self.name != "uint8":
            return (*shape, self.itemsize)
        return shape


def _table() -> dict[str, DType]:
    rows = [("bool", 1, "BOOL", "bool")]
    rows += [(f"uint{8 * n}", n, f"U{8 * n}", f"uint{8 * n}") for n in (1, 2, 4, 8)]
    rows += [(f"int{8 * n}", n, f"I{8 * n}", f"int{8 * n}") for n in (1, 2, 4, 8)]
    rows += [(f"float{8 * n}", n, f"F{8 * n}", f"float{8 * n}") for n in (2, 4, 8)]
    rows += [("complex64", 8, "C64", "complex64"), ("complex128", 16, "U8", "complex128")]
    plain = [("bfloat16", 2, "BF16"), ("complex32", 4, "U8"), ("float4_e2m1fn_x2", 1, "F4")]
    plain += [("float8_e4m3fn", 1, "F8_E4M3"), ("float8_e5m2", 1, "F8_E5M2"), ("float8_e8m0fnu", 1, "F8_E8M0")]
    plain += [("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"), ("float8_e5m2fnuz", 1, "F8_E5M2FNUZ")]
    known = [DType(name=n, itemsize=i, safetensors=s, numpy=p) for n, i, s, p in rows]
    known += [DType(name=n, itemsize=i, safetensors=s) for n, i, s in plain]
    return {d.name: d for d in known}


DTYPES = _table()
"""name → DType."""

FROM_SAFETENSORS = {d.safetensors: d for d in DTYPES.values() if d.safetensors != "U8"} | {"U8": DTYPES["uint8"]}
"""safetensors spelling → DType."""


def dtype(name: str) -> DType:
    """Look a dtype up by name."""
    row = DTYPES.get(name)
    if row is None:
        raise FormatError(f"unknown dtype {name!r}", hint=f"known dtypes: {', '.join(sorted(DTYPES))}")
    return row
