"""HTML and SVG as text. Escaping is not the caller's to remember: whatever is not ``Markup`` is escaped where it is put in."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ckpt.text.printable import printable

_LONGEST = 96
_VOID = frozenset({"meta", "br", "col"})


class Markup(str):
    """Text that is HTML already. Only this module makes it of what others wrote, escaped."""

    __slots__ = ()


def tag(name: str, /, *children: str | Markup, **attributes: object) -> Markup:
    """An element. ``class_`` stands for ``class``, ``view_box`` for ``viewBox``, other underscores for hyphens; None leaves out."""
    given = "".join(f' {_attribute(key)}="{text(str(value))}"' for key, value in attributes.items() if value is not None)
    return Markup(f"<{name}{given}>" if name in _VOID else f"<{name}{given}>{join(children)}</{name}>")


def join(parts: Sequence[str]) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else text(part) for part in parts))


def text(value: str) -> str:
    """Escaped, on one line, and without control characters or halves of characters, which no HTML file may hold."""
    clean = printable(value, one_line=True).encode("utf-8", "backslashreplace").decode("utf-8")
    return html.escape(clean, quote=True)


def short(value: str, most: int = _LONGEST) -> str:
    """At most so many characters, the middle left out: names differ at their ends."""
    return value if len(value) <= most else f"{value[: most // 2 - 1]}…{value[-(most - most // 2) :]}"


def _attribute(key: str) -> str:
    known = {"class_": "class", "view_box": "viewBox", "preserve_aspect_ratio": "preserveAspectRatio", "for_": "for"}
    return known.get(key, key.replace("_", "-"))


def percent(share: float) -> str:
    """A length as a share of the width, so that charts fit any screen: ``12.5%``."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"
