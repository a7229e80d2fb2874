"""Terms and translations against numpy: what comes out to the right is what the framework's own code would put together by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt.converters.mapping.translation import TranslationRules, parse_translation
from ckpt.errors import NamesError, UsageError
from ckpt.plan.views import LogicalTensor
from tests.plan.test_views import array, read

Arrays = dict[str, np.ndarray]

HEAD = 'left = "huggingface"\nright = "megatron"\n'
ATTENTION = """
[[term]]
left = ["l.{layer}.q.{kind}", "l.{layer}.k.{kind}", "l.{layer}.v.{kind}"]
right = "d.{layer}.qkv.{kind}"
steps = [{ interleave = 0, groups = "kv_heads", sizes = ["q_rows", "kv_rows", "kv_rows"] }]
each = { kind = ["weight", "bias"] }
optional = true
"""
EXPERTS = """
[[term]]
left = ["l.{layer}.experts.{expert}.gate", "l.{layer}.experts.{expert}.up"]
right = "d.{layer}.experts.fc1"
steps = [{ concat = 0 }, { stack = 0, over = "expert" }]
"""
GROUPED = """
[[term]]
left = ["l.{layer}.experts.{expert}.gate", "l.{layer}.experts.{expert}.up"]
right = "d.{layer}.weight1"
steps = [{ concat = 0 }, { transpose = [1, 0] }, { concat = 1, over = "expert", count = "experts" }]
"""
EMBEDDING = '[[term]]\nleft = "tokens"\nright = "embedding"\nsteps = [{ pad = 0, real = "vocabulary", to = "padded" }]\n'
NUMBERS = {"kv_heads": 2, "q_rows": 8, "kv_rows": 4, "experts": 3, "vocabulary": 5, "padded": 8}


def numbered(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    return {name: array(shape, 1000 * i) for i, (name, shape) in enumerate(shapes.items())}


def through(t: TranslationRules, arrays: Arrays) -> Arrays:
    """To the right, and back again: which must give what went in."""
    right = t.views({n: a.shape for n, a in arrays.items()}, "rightwards", NUMBERS)
    made = {name: read(view, arrays) for name, view in right.items()}
    back: dict[str, LogicalTensor] = t.views({n: a.shape for n, a in made.items()}, "leftwards", NUMBERS)
    assert set(back) == set(arrays)
    for name, expected in arrays.items():
        assert np.array_equal(read(back[name], made), expected), name
    return made


def test_attention_in_groups() -> None:
    """4 query heads and 2 key-value heads of 2 rows."""
    arrays = numbered({f"l.{n}.{p}.weight": (8 if p == "q" else 4, 3) for n in (0, 7) for p in "qkv"})
    made = through(parse_translation(HEAD + ATTENTION, "t"), arrays)
    assert set(made) == {"d.0.qkv.weight", "d.7.qkv.weight"}
    q, k, v = (arrays[f"l.7.{p}.weight"] for p in "qkv")
    assert np.array_equal(made["d.7.qkv.weight"], np.concatenate([q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]]))


def test_experts_stacked_and_grouped() -> None:
    arrays = numbered({f"l.1.experts.{e}.{p}": (2, 3) for p in ("gate", "up") for e in (2, 0, 1)})
    both = [np.concatenate([arrays[f"l.1.experts.{e}.gate"], arrays[f"l.1.experts.{e}.up"]]) for e in range(3)]
    stacked = through(parse_translation(HEAD + EXPERTS, "t"), arrays)
    assert np.array_equal(stacked["d.1.experts.fc1"], np.stack(both))
    grouped = through(parse_translation(HEAD + GROUPED, "t"), arrays)
    assert np.array_equal(grouped["d.1.weight1"], np.concatenate([b.T for b in both], axis=1))


def test_a_padded_vocabulary() -> None:
    made = through(parse_translation(HEAD + EMBEDDING, "t"), {"tokens": array((5, 2), 0)})
    assert made["embedding"][:5].tolist() == array((5, 2), 0).tolist()
    assert (made["embedding"][5:] == -1).all()  # filling


def test_a_vocabulary_with_rows_missing_is_not_padded() -> None:
    """Filling would take the place of tokens that there should be."""
    with pytest.raises(UsageError, match=r"\[4, 2\] has fewer than the 5 elements"):
        through(parse_translation(HEAD + EMBEDDING, "t"), {"tokens": array((4, 2), 0)})


def test_rotary_pairs() -> None:
    """As ``permute`` of transformers' convert_llama_weights_to_hf.py turns round: view(heads, dim/2, 2, ·) to (heads, 2, dim/2, ·)."""
    term = '[[term]]\nleft = "q"\nright = "wq"\nsteps = [{ rotary = 0, groups = 3 }]\n'
    halves = array((3 * 8, 2), 0)
    made = through(parse_translation(HEAD + term, "t"), {"q": halves})
    assert np.array_equal(made["wq"], halves.reshape(3, 2, 4, 2).transpose(0, 2, 1, 3).reshape(24, 2))


def test_numbers_in_names_are_read_strictly() -> None:
    t = parse_translation(HEAD + '[[term]]\nleft = "fc1.w{n}"\nright = "x{n}.y{n}"\n', "t")
    assert set(t.views({"fc1.w12": (1,)}, "rightwards")) == {"x12.y12"}
    for wrong in ("fc2.w12", "fc1.w012", "fc1.w", "xfc1.w1"):
        with pytest.raises(NamesError, match="match no term"):
            t.views({wrong: (1,)}, "rightwards")
    with pytest.raises(NamesError, match="match no term"):
        t.views({"x1.y2": (1,)}, "leftwards")


def test_what_is_left_over_is_an_error_and_names_all() -> None:
    t = parse_translation(HEAD + 'left_ignores = ["*inv_freq"]\n' + ATTENTION + EMBEDDING, "t")
    with pytest.raises(NamesError) as told:
        t.views({"a.strange": (1,), "z.other": (2,), "rope.inv_freq": (3,)}, "rightwards", NUMBERS)
    text = str(told.value)
    assert "a.strange" in text and "z.other" in text and "tokens → embedding" in text
    assert "inv_freq" not in text and "qkv" not in text  # ignored, and optional
    assert t.views({}, "rightwards", NUMBERS, partial=True) == {}


def test_a_lost_partner_is_an_error() -> None:
    t = parse_translation(HEAD + ATTENTION + EXPERTS, "t")
    shapes = {f"l.0.experts.{e}.{p}": (2, 3) for e in (0, 2) for p in ("gate", "up")}
    numbers = {name: n for name, n in NUMBERS.items() if name != "experts"}
    with pytest.raises(UsageError, match=r"'d.0.experts.fc1' needs 'l.\{layer\}.experts.\{expert\}.gate', number 1 and 1 more"):
        t.views(shapes, "rightwards", numbers)
    with pytest.raises(UsageError, match=r"needs 'l.\{layer\}.v.weight', which is not there"):
        t.views({"l.0.q.weight": (8, 1), "l.0.k.weight": (4, 1)}, "rightwards", NUMBERS, partial=True)


def test_layers_and_experts_that_are_not_there() -> None:
    norms = '[[term]]\nleft = "l.{layer}.norm"\nright = "d.{layer}.norm"\n'
    t = parse_translation(
        HEAD
        + norms
        + EXPERTS.replace("steps", 'beside = "l.{layer}.gate"\nsteps')
        + '[[term]]\nleft = "l.{layer}.gate"\nright = "d.{layer}.gate"\nbeside = "l.{layer}.gate"\n',
        "t",
    )
    whole = (
        {f"l.{n}.norm": (2,) for n in range(3)}
        | {"l.2.gate": (2,)}
        | {f"l.2.experts.{e}.{p}": (2, 3) for e in range(2) for p in ("gate", "up")}
    )
    numbers = {"layers": 3, "experts": 2}
    assert len(t.views(whole, "rightwards", numbers)) == 5
    for lost, told in (("l.1.norm", r"layers \[1\]"), ("l.2.experts.1", "1 of 2 experts of layer 2")):
        some = {name: shape for name, shape in whole.items() if not name.startswith(lost)}
        with pytest.raises(NamesError, match=told):
            t.views(some, "rightwards", numbers)
    with pytest.raises(NamesError, match=r"layers \[3, 4\]"):
        t.views(whole, "rightwards", {"layers": 5})
    assert t.views({"l.1.norm": (2,)}, "rightwards", numbers, partial=True)


def test_a_number_that_nothing_says() -> None:
    with pytest.raises(UsageError, match="needs numbers of the model that are not given: kv_heads") as told:
        parse_translation(HEAD + ATTENTION, "t").views({f"l.0.{p}.bias": (8,) for p in "qkv"}, "rightwards")
    assert "--set kv_heads" in str(told.value)


def test_shapes_that_do_not_fit_the_steps() -> None:
    t = parse_translation(HEAD + ATTENTION, "t")
    with pytest.raises(UsageError, match=r"'d.0.qkv.weight' cannot be taken apart"):
        t.views({"d.0.qkv.weight": (15, 2)}, "leftwards", NUMBERS)
    with pytest.raises(UsageError, match=r"cannot be made: .*cannot be put together"):
        t.views({"l.0.q.weight": (8, 2), "l.0.k.weight": (4, 3), "l.0.v.weight": (4, 2)}, "rightwards", NUMBERS)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("left = 3 =", "not TOML"),
        ('left = "a"', "needs left and right"),
        (HEAD + "other = 1", "needs left and right"),
        (HEAD + '[[term]]\nleft = "a"', "a term needs left and right"),
        (HEAD + '[[term]]\nleft = "a"\nright = "b"\nmore = 1', "a term needs left and right"),
        (HEAD + '[[term]]\nleft = "a.{n}"\nright = "b"', "different numbers"),
        (HEAD + '[[term]]\nleft = ["a", "c"]\nright = "b"', "puts them together"),
        (HEAD + '[[term]]\nleft = "a"\nright = "b"\nsteps = [{ melt = 0 }]', "a step is one of"),
        (HEAD + '[[term]]\nleft = "a"\nright = "b"\nsteps = [{ concat = 0, stack = 0 }]', "a step is one of"),
        (HEAD + '[[term]]\nleft = "a.{n}"\nright = "b"\nsteps = [{ stack = 0 }]', "needs over"),
        (HEAD + '[[term]]\nleft = "a.{n}"\nright = "b"\nsteps = [{ concat = 0, over = "n" }]', "needs its count"),
        (HEAD + '[[term]]\nleft = ["a", "c"]\nright = "b"\nsteps = [{ interleave = 0, groups = 2 }]', "needs groups and sizes"),
        (HEAD + '[[term]]\nleft = "a"\nright = "b"\nsteps = [{ pad = 0, to = 4 }]', "needs real and to"),
        (HEAD + '[[term]]\nleft = "a.{n}"\nright = "b.{n}"\nsteps = [{ pad = 0, over = "n", real = 1, to = 4 }]', "does not go over"),
    ],
)
def test_a_translation_that_is_none(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as error:
        parse_translation(text, "mine.toml")
    assert error.value.where == "mine.toml"


def test_a_name_that_fits_two_terms() -> None:
    two = '[[term]]\nleft = "a.{n}"\nright = "b.{n}"\n[[term]]\nleft = "a.{m}"\nright = "c.{m}"\n'
    with pytest.raises(UsageError, match="make the terms exclusive"):
        parse_translation(HEAD + two, "t").views({"a.1": (1,)}, "rightwards")


def test_two_tensors_that_become_one_are_named_with_what_they_become():
    terms = '[[term]]\nleft = "a.weight"\nright = "w"\n[[term]]\nleft = "b.weight"\nright = "w"\n'
    with pytest.raises(UsageError, match=r"'w' would be there twice: a\.weight → w, and b\.weight → w"):
        parse_translation(HEAD + terms, "t").views({"a.weight": (2,), "b.weight": (2,)}, "rightwards")
