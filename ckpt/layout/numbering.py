"""Names with local numbers: layers of a pipeline stage, experts of an expert-parallel rank."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt.errors import LayoutError


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbered:
    """Names with a local number that is not the global one: layers of a pipeline stage, experts of an expert-parallel rank.

    ``pattern`` is a part of the name in which ``{n}`` stands for the number and ``{chunk}``, if there, for the model chunk of a virtual
    pipeline; ``to`` is what it becomes. ``ids[coordinate][chunk][local]`` is the global number. With ``stack`` the numbered
    tensors are stored as one tensor with a new dimension ``stack``; ``{n}`` and the dot after it then vanish from the name.
    """

    pattern: str
    to: str
    over: str
    ids: tuple[tuple[tuple[int, ...], ...], ...]
    stack: int | None = None
    mesh: str | None = None
    stage: bool = False
    """True for a pipeline: tensors without a number then live on the stages that have them."""

    def regex(self) -> re.Pattern[str]:
        """Finds the pattern in a name, between dots, with the numbers as groups ``n`` and ``chunk``."""
        text = re.escape(self.pattern).replace(r"\{n\}", r"(?P<n>\d+)").replace(r"\{chunk\}", r"(?P<chunk>\d+)")
        return re.compile(r"(?<![^.])" + text + r"(?![^.])")

    def count(self) -> int:
        """How many numbered things there are in all."""
        return sum(len(chunk) for coordinate in self.ids for chunk in coordinate)


def pipeline(
    pattern: str, *, layers: int, stages: int, virtual: int = 1, over: str = "pp", to: str | None = None, stack: int | None = None
) -> Numbered:
    """Layers over pipeline stages: contiguous blocks, or with ``virtual`` chunks per stage Megatron's interleaved order.

    ``pattern`` is such as ``"layers.{n}"`` or ``"{chunk}.layers.{n}"``. Chunk v of stage p has layers ``v·L/V + p·L/(V·P)`` and following
    (megatron/core/transformer/transformer_block.py, get_num_layers_to_build and the layer offset).
    """
    per, rest = divmod(layers, stages * virtual)
    if rest:
        raise LayoutError(f"{layers} layers do not divide into {stages} stages of {virtual} chunks", hint="give Numbered(ids=...) yourself")
    ids = tuple(
        tuple(tuple(range(v * stages * per + p * per, v * stages * per + (p + 1) * per)) for v in range(virtual)) for p in range(stages)
    )
    target = to if to is not None else pattern.replace("{chunk}.", "")
    return Numbered(pattern=pattern, to=target, over=over, ids=ids, stack=stack, stage=True)


def experts(
    pattern: str, *, count: int, ranks: int, over: str = "ep", to: str | None = None, stack: int | None = None, mesh: str | None = None
) -> Numbered:
    """Experts over expert-parallel ranks, contiguous blocks: ``pattern`` is such as ``"experts.{n}"``."""
    per, rest = divmod(count, ranks)
    if rest:
        raise LayoutError(f"{count} experts do not divide over {ranks} ranks", hint="give Numbered(ids=...) yourself")
    ids = tuple((tuple(range(r * per, (r + 1) * per)),) for r in range(ranks))
    return Numbered(pattern=pattern, to=pattern if to is None else to, over=over, ids=ids, stack=stack, mesh=mesh)
