"""Which stored tensor goes to which wanted one: names, globs, renames, shapes, dtypes and padding."""

from __future__ import annotations

import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.catalog import Grid, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.errors import UsageError
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.match import EnclosingModule, Selection, enclosing_module, misfit, report_names, ways_out
from ckpt.plan.ownership import TensorSpec
from ckpt.plan.reads import common_box

Shape = tuple[int, ...]
ALONE = TensorLayout(Mesh.of({"dp": 1}))


def wanted(shape: Shape, logical: Shape | None = None, dtype: str = "float32") -> TensorSpec:
    return TensorSpec("w", DTYPES[dtype], shape, ALONE, logical)


def stored(shape: Shape, logical: Shape | None = None, dtype: str = "float32", name: str = "w") -> TensorEntry:
    grid = Grid(cuts=tuple((0, n) for n in shape), files=np.zeros(1, dtype=np.int32))
    return TensorEntry(name=name, dtype=DTYPES[dtype], shape=shape, grid=grid, logical=logical)


def label(value: object) -> str | None:
    """A short id for a test's parameter."""
    if isinstance(value, TensorSpec | TensorEntry):
        return "x".join(map(str, value.shape)) + (f" of {'x'.join(map(str, value.logical))}" if value.logical else "")
    return "" if isinstance(value, str) else None


# --------------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("rename", "old", "new"),
    [
        ((), "a.b", "a.b"),
        ((("a.b", "c"),), "a.b", "c"),
        ((("a.b", "c"),), "a.b.d", "a.b.d"),
        ((("model.*", "net.*"),), "model.layers.0.w", "net.layers.0.w"),
        ((("*.weight", "*.w"),), "a.b.weight", "a.b.w"),
        ((("*", "module.*"),), "a", "module.a"),
        ((("module.*", "*"),), "module.a", "a"),
        ((("a.*.b", "x.*.y"),), "a.0.1.b", "x.0.1.y"),
        ((("ab*ba", "*"),), "aba", "aba"),
        ((("ab*ba", "<*>"),), "abba", "<>"),
        ((("a.[0]", "b"),), "a.0", "a.0"),
        ((("a.[0].*", "b.*"),), "a.[0].w", "b.w"),
        ((("a.*", "x.*"), ("a.b", "y")), "a.b", "x.b"),
        ((("a.b", "y"), ("a.*", "x.*")), "a.b", "y"),
        ((("a", "b"), ("b", "c")), "a", "b"),
    ],
    ids=str,
)
def test_renames(rename: tuple[tuple[str, str], ...], old: str, new: str) -> None:
    assert Selection(rename=rename).renamed(old) == new


NAMES = st.text(string.ascii_lowercase + ".[]?", min_size=0, max_size=5)


@given(NAMES, NAMES, NAMES, NAMES, NAMES)
def test_one_star_stands_for_the_same_text(head: str, text: str, tail: str, new_head: str, new_tail: str) -> None:
    renamed = Selection(rename=((f"{head}*{tail}", f"{new_head}*{new_tail}"),)).renamed(head + text + tail)
    assert renamed == new_head + text + new_tail


@pytest.mark.parametrize("rule", [("a.*", "b"), ("a", "b.*"), ("*.*", "*.*"), ("a", "**")])
def test_renames_that_cannot_be(rule: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match="each side needs one"):
        Selection(rename=(rule,))


def test_a_view_has_all_tensors_under_their_new_names() -> None:
    entries = {n: stored((2,), name=n) for n in ("model.a", "model.b", "optim.a")}
    view = Selection(rename=(("model.*", "*"),)).view(entries)
    assert {new: e.name for new, e in view.items()} == {"a": "model.a", "b": "model.b", "optim.a": "optim.a"}


def test_two_tensors_cannot_become_one() -> None:
    entries = {n: stored((2,), name=n) for n in ("a.w", "b.w")}
    for rename in ((("a.*", "*"), ("b.*", "*")), (("a.w", "b.w"),)):
        with pytest.raises(UsageError, match=r"'a.w' and 'b.w' both '(b\.)?w'"):
            Selection(rename=rename).view(entries)


def test_names_may_be_swapped() -> None:
    entries = {n: stored((2,), name=n) for n in ("a", "b")}
    view = Selection(rename=(("a", "b"), ("b", "a"))).view(entries)
    assert {new: e.name for new, e in view.items()} == {"a": "b", "b": "a"}


@pytest.mark.parametrize(
    ("only", "name", "is_wanted"),
    [
        ((), "anything", True),
        (("model.*",), "model.a.b", True),
        (("model.*",), "model", False),
        (("model.*",), "my.model.a", False),
        (("*.bias", "*.weight"), "a.weight", True),
        (("*.bias", "*.weight"), "a.weights", False),
        (("layers.[01].*",), "layers.1.w", True),
        (("layers.[01].*",), "layers.2.w", False),
        (("Model.*",), "model.a", False),
    ],
)
def test_only(only: tuple[str, ...], name: str, is_wanted: bool) -> None:
    assert Selection(only=only).wants(name) is is_wanted


# ---------------------------------------------------------------------------------------------------------- shapes and dtypes


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (wanted((4, 3)), stored((4, 3))),
        (wanted(()), stored(())),
        (wanted((0, 3)), stored((0, 3))),
        (wanted((12, 3), (10, 3)), stored((12, 3), (10, 3))),
        (wanted((12, 3), (10, 3)), stored((16, 3), (10, 3))),
        (wanted((10, 3)), stored((16, 3), (10, 3))),
        (wanted((16, 3), (10, 3)), stored((10, 3))),
        (wanted((12, 3)), stored((12, 3), (10, 3))),
        (wanted((12, 3), (10, 3)), stored((12, 3))),
    ],
    ids=label,
)
def test_what_fits(mine: TensorSpec, theirs: TensorEntry) -> None:
    assert misfit(mine, theirs, cast=False) is None


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        (wanted((4, 3)), stored((4, 4)), "shape [4, 4] in the checkpoint, [4, 3] in the state"),
        (wanted((4, 3)), stored((3, 4)), "shape [3, 4] in the checkpoint, [4, 3] in the state"),
        (wanted((4,)), stored((4, 1)), "shape [4, 1] in the checkpoint, [4] in the state"),
        (wanted((1,)), stored(()), "shape [] in the checkpoint, [1] in the state"),
        (wanted((12, 3), (10, 3)), stored((16, 3), (11, 3)), "shape [11, 3] in the checkpoint, [10, 3] in the state without padding"),
        (wanted((16, 3), (10, 3)), stored((16, 3), (11, 3)), "shape [11, 3] in the checkpoint, [10, 3] in the state without padding"),
        (wanted((12, 3)), stored((16, 3), (10, 3)), "shape [10, 3] in the checkpoint, [12, 3] in the state without padding"),
        (wanted((12, 3), (10, 3)), stored((16, 3)), "shape [16, 3] in the checkpoint, [10, 3] in the state without padding"),
    ],
    ids=label,
)
@pytest.mark.parametrize("cast", [False, True])
def test_what_does_not_fit(mine: TensorSpec, theirs: TensorEntry, message: str, cast: bool) -> None:
    assert misfit(mine, theirs, cast=cast) == message


def test_dtypes_differ_only_if_asked_for() -> None:
    mine, theirs = wanted((4,), dtype="bfloat16"), stored((4,), dtype="float32")
    assert misfit(mine, theirs, cast=False) == "dtype float32 in the checkpoint, bfloat16 in the state (cast=True converts)"
    assert misfit(mine, theirs, cast=True) is None
    assert misfit(wanted((5,), dtype="bfloat16"), theirs, cast=True) == "shape [4] in the checkpoint, [5] in the state"


# ------------------------------------------------------------------------------------------------------------------- padding


def loaded(mine: TensorSpec, theirs: TensorEntry, array: np.ndarray) -> np.ndarray:
    """A wanted tensor as a load leaves it: the common box from the stored array, zeros elsewhere."""
    found = np.full(mine.shape, -1, dtype=np.int64)
    box = common_box(mine, theirs)
    if box != Box.whole(mine.shape):
        found[...] = 0
    found[box.slices] = array[box.slices]
    return found


@given(st.integers(0, 6), st.integers(0, 3), st.integers(0, 3), st.booleans(), st.booleans())
def test_padding_is_not_taken_from_another_padding(rows: int, more: int, their_more: int, known: bool, their_known: bool) -> None:
    """``more`` rows of padding; whoever has none need not say so."""
    mine = wanted((rows + more, 2), (rows, 2) if more or known else None)
    theirs = stored((rows + their_more, 2), (rows, 2) if their_more or their_known else None)
    assert misfit(mine, theirs, cast=False) is None
    array = np.arange(1, (rows + their_more) * 2 + 1).reshape(-1, 2)
    expected = array if more == their_more else np.concatenate([array[:rows], np.zeros((more, 2), dtype=np.int64)])
    assert np.array_equal(loaded(mine, theirs, array), expected)


def test_padding_along_two_dimensions() -> None:
    mine, theirs = wanted((5, 4), (3, 3)), stored((4, 6), (3, 3))
    array = np.arange(1, 25).reshape(4, 6)
    expected = np.zeros((5, 4), dtype=np.int64)
    expected[:3, :3] = array[:3, :3]
    assert np.array_equal(loaded(mine, theirs, array), expected)


@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_without_padding_all_is_common(shape: Shape) -> None:
    assert common_box(wanted(shape), stored(shape)) == Box.whole(shape)


# ------------------------------------------------------------------------------------------------------------------- reports


def test_reports_list_names_in_order() -> None:
    assert report_names("missing", ["b", "a"]) == ["  missing (2):", "    a", "    b"]
    assert report_names("missing", []) == []


def test_long_reports_are_cut_and_counted() -> None:
    lines = report_names("missing", (f"t{i:03}" for i in range(50)), limit=3)
    assert lines == ["  missing (50):", "    t000", "    t001", "    t002", "    and 47 more"]


@pytest.mark.parametrize(("ranks", "mine", "said"), [(1, 4, True), (1, 3, False), (2, 3, True), (1, 16, False)])
def test_a_shape_that_may_be_a_part_leads_to_layouts_and_another_to_the_model(ranks: int, mine: int, said: bool) -> None:
    text = misfit(wanted((mine, 2)), stored((8, 2)), cast=False)
    hint = ways_out(missing=False, unexpected=False, texts=[f"w: {text}"], ranks=ranks)
    assert ("layout=" in hint) is said
    assert ("give the model the stored shapes, which `ckpt inspect` shows; only=[...] loads a part" in hint) is not said


# ------------------------------------------------ Names of parameters without their module: which module is meant, or that nobody can know.


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ({"model.a", "model.b"}, {"a", "b"}, ("model", {"a", "b"}, False)),
        ({"model.a"}, {"a", "b"}, ("model", {"a"}, False)),  # the first of two pipeline stages
        ({"model.a", "model.b"}, {"a"}, ("model", {"a"}, False)),  # b never had a gradient
        ({"wrapped.model.a", "model.b", "a.b"}, {"a"}, ("wrapped.model", {"a"}, False)),
        ({"m.0.w", "m.1.0.w"}, {"0.w", "1.0.w"}, ("m", {"0.w", "1.0.w"}, True)),  # though 0.w is also the name of m.1.0.w within m.1
        ({"m.0.w", "m.1.0.w", "m.1.1.w"}, {"0.w", "1.w"}, ("m.1", {"0.w", "1.w"}, True)),  # a guess: the caller sees what is not explained
        ({"a.w", "b.w"}, {"w"}, None),
        ({"a.w", "a.x", "b.w", "b.y"}, {"w", "x", "y"}, None),
        ({"model.a"}, {"model.a"}, None),
        ({"model.a"}, set(), None),
        (set(), {"a"}, None),
    ],
)
def test_the_module_in_front(outer: set[str], inner: set[str], expected: tuple[str, set[str], bool] | None) -> None:
    module = enclosing_module(inner, outer)
    assert module == (None if expected is None else EnclosingModule(path=expected[0], explained=expected[1], rivals=expected[2]))


_NAMES = st.lists(st.sampled_from("ab01"), min_size=1, max_size=4).map(".".join)


@given(st.frozensets(_NAMES, max_size=6), st.frozensets(_NAMES, max_size=6))
def test_no_other_module_explains_what_the_chosen_one_does_not(inner: frozenset[str], outer: frozenset[str]) -> None:
    paths = {name[:i] for name in outer for i, character in enumerate(name) if character == "."}
    explains = {path: {name for name in inner if f"{path}.{name}" in outer} for path in paths}
    module = enclosing_module(inner, outer)
    if module is None:
        fitting = [names for names in explains.values() if names]
        assert not fitting or inner & outer or not any(all(names < best or names is best for names in fitting) for best in fitting)
    else:
        assert module.explained == explains[module.path]
        assert all(names < module.explained for path, names in explains.items() if path != module.path)
        assert module.rivals == (sum(map(bool, explains.values())) > 1)
