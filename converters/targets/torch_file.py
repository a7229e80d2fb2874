"""Conversion into one file that ``torch.load`` reads: the nested state."""

from __future__ import annotations

from ckpt.converters.pipeline.target import OutputFile, OutputOptions, OutputPlan, Target
from ckpt.converters.pipeline.windows import FileItem
from ckpt.converters.select.selection import OutputSet, OutputTensor, choose
from ckpt.errors import UsageError
from ckpt.layout.geometry import Box

from .nested_state import nested_state
from .torch_archive import ArchivePlan, StorageStub


def plan(chosen: OutputSet, layout: OutputOptions) -> OutputPlan:
    """One archive with everything."""
    if layout.name is None:
        raise UsageError("the format torch is one file", where=layout.url, hint="name the file")
    if layout.shard_size is not None:
        raise UsageError("the format torch has one file", hint="leave out --shard-size")
    stands: dict[str, StorageStub] = {}
    members: list[OutputTensor] = []

    def leaf(wanted: OutputTensor) -> StorageStub:
        real = chosen.tensors[wanted.alias] if wanted.alias is not None else wanted
        if real.name not in stands:
            members.append(real.without_padding())
            stands[real.name] = StorageStub(len(stands), real.dtype, members[-1].shape)
        return stands[real.name]

    state = nested_state(chosen, leaf)
    archive = ArchivePlan(state, list(stands.values()))
    items = [FileItem(w.name, Box.whole(w.shape), at, w.dtype.itemsize) for w, at in zip(members, archive.starts, strict=True)]
    file = OutputFile(path=layout.name, size=archive.size, items=tuple(items), ends=archive.ends)
    return OutputPlan(files=(file,), digest="crc32", finish=lambda backend: None)


TARGET = Target(name="torch", computes=True, choose=choose, plan=plan, one_file=lambda url: True)
"""For ``ckpt.converters.pipeline.target``."""
