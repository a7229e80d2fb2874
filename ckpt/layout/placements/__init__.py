"""Placements: how rules and DTensors say that a tensor lies over the ranks. ``base`` has what each of them answers."""

from .annotations import GlobalShape as GlobalShape
from .annotations import OnMesh as OnMesh
from .annotations import Padded as Padded
from .annotations import Replicate as Replicate
from .annotations import Stage as Stage
from .annotations import Uneven as Uneven
from .base import AxisSplit as AxisSplit
from .base import BlockSplit as BlockSplit
from .base import Piece as Piece
from .base import Placement as Placement
from .base import Split as Split
from .boxes import Boxes as Boxes
from .boxes import StatedBoxes as StatedBoxes
from .flat import Flat as Flat
from .interleaved import Interleaved as Interleaved
from .shard import Shard as Shard
