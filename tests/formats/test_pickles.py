"""Pickles are read as data: nothing they name runs, nothing they claim takes memory, and whatever the bytes are, the outcome is said."""

from __future__ import annotations

import builtins
import contextlib
import os
import pickle
import pickletools
import struct
import sys
import tracemalloc
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt.errors import CkptError, CorruptError, FormatError
from ckpt.formats.pickle_loader import load_pickle
from ckpt.formats.pickle_nodes import NodeMaker
from ckpt.formats.pickle_values import PickleValues
from ckpt.formats.stand_ins import GlobalName, Made, Persistent, StoredView
from ckpt.plan import tree


def read(data: bytes) -> object:
    return load_pickle(data, "there")


def node(data: bytes) -> object:
    maker = NodeMaker(PickleValues("there"), lambda found, path: {"$tensor": path}, pickle_bytes=len(data))
    return maker.root(read(data))


# --------------------------------------------------------------------------------------------------------- plain values

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(2**200), max_value=2**200),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(max_size=300),
)
keys = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.integers(), st.tuples(st.integers(), st.text("ab")))


def containers(inner):
    listed = st.lists(inner, max_size=4)
    return st.one_of(
        listed,
        listed.map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.sets(st.integers(), max_size=4),
        st.frozensets(st.text("ab"), max_size=3),
    )


states = st.recursive(scalars, containers, max_leaves=20)


@given(states, st.integers(0, 5))
@example({"a": [1, (2, b"x"), {3}]}, 0)
def test_plain_values_come_back(value, protocol):
    """As the node that ``ckpt.save`` would store, which keeps types apart."""
    assert node(pickle.dumps(value, protocol)) == tree.encode(value, "", lambda value, path: None)


@given(states)
def test_values_of_protocol_four_are_the_values_themselves(value):
    data = pickle.dumps(value, 4)
    if not any(op.name in ("REDUCE", "NEWOBJ") for op, _, _ in pickletools.genops(data)):
        found = read(data)
        assert found == value and tree.encode(found, "", str) == tree.encode(value, "", str)


def test_sharing_and_cycles_are_kept():
    shared = [1]
    found = read(pickle.dumps([shared, shared]))
    assert found[0] is found[1]
    around = []
    around.append(around)
    found = read(pickle.dumps(around))
    assert found[0] is found
    with pytest.raises(CorruptError, match="contains itself"):
        node(pickle.dumps(around))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<i4").reshape(2, 3),
        np.arange(6, dtype=">f8").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype="f4").reshape(2, 3)),
        np.float64(1.5),
        np.array(True),
        np.zeros((0, 3), "c16"),
        np.uint8(7),
    ],
)
def test_numpy(array, protocol):
    assert node(pickle.dumps(array, protocol)) == tree.encode(array, "", lambda value, path: None)


def test_numpy_of_objects_stays_opaque():
    found = node(pickle.dumps({"a": np.array(["x", None], dtype=object)}))
    assert found["a"]["__class__"].endswith("_reconstruct")


def test_text_of_protocol_zero_by_hand():
    data = b"(dS'a'\nI01\nsS'b'\nL123L\nsS'c'\nF1.5\nsV\\u00e9\nI00\ns."
    assert read(data) == pickle.loads(data) == {"a": True, "b": 123, "c": 1.5, "é": False}


def test_opcodes_are_all_known():
    from ckpt.formats.pickle_loader import OPCODES

    assert {op.code.encode("latin1") for op in pickletools.opcodes} == OPCODES.keys() | {pickle.STOP}


# ------------------------------------------------------------------------------------------------------- what would run


class Runs:
    """Runs ``call`` when it is unpickled for real."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


class WithState:
    def __setstate__(self, state):
        os.mkdir(state)


class WithSlots:
    __slots__ = ("a",)


def exploits(path: str) -> dict[str, bytes]:
    """Pickles that make the directory ``path`` when Python's own pickle reads them."""
    text = path.encode()
    code = f"__import__('os').mkdir({path!r})"
    word = b"\x8c" + bytes([len(text)]) + text
    return {
        "mkdir": pickle.dumps(Runs(os.mkdir, path)),
        "system": pickle.dumps(Runs(os.system, f"mkdir '{path}'")),
        "eval": pickle.dumps(Runs(eval, code)),
        "exec": pickle.dumps(Runs(exec, code), 0),
        "in a list in a dict key": pickle.dumps({"a": [1, (Runs(os.mkdir, path),)]}),
        "global": b"cos\nmkdir\n(S'" + text + b"'\ntR.",
        "inst": b"(S'" + text + b"'\nios\nmkdir\n.",
        "obj": b"(cos\nmkdir\nS'" + text + b"'\no.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93" + word + b"\x85R.",
        "getattr chain": b"cbuiltins\ngetattr\n(c__builtin__\n__import__\n(S'os'\ntRS'mkdir'\ntR(S'" + text + b"'\ntR.",
        "dotted name": b"\x80\x04\x8c\x02os\x8c\x0dpath.os.mkdir\x93" + word + b"\x85R.",
        "map": b"cbuiltins\nlist\n(cbuiltins\nmap\n(cos\nmkdir\n(S'" + text + b"'\nltRtR.",
        "partial": b"cfunctools\npartial\n(cos\nmkdir\nS'" + text + b"'\ntR)R.",
        "newobj": b"\x80\x02cargparse\nNamespace\n)\x81(dS'x'\nI1\nsb0cos\nmkdir\n(S'" + text + b"'\ntR.",
        "setstate": f"c{__name__}\nWithState\n".encode() + b")\x81S'" + text + b"'\nb.",
        "after memo tricks": b"cos\nmkdir\np9\n0(S'" + text + b"'\ntp8\n0g9\ng8\nR.",
        "copyreg": b"ccopyreg\n__newobj__\n(cbuiltins\nobject\ntR0cos\nmkdir\n(S'" + text + b"'\ntR.",
    }


@pytest.mark.parametrize("name", exploits("x"))
def test_exploits_do_nothing(name, tmp_path):
    path = tmp_path / "made"
    data = exploits(str(path))[name]
    found = read(data)
    node(data)
    assert isinstance(found, (Made, dict)) and not path.exists()
    pickle.loads(data)
    assert path.exists(), "the exploit is none: the test would pass whatever the reader did"


def test_slots_and_kwargs_are_kept_as_data():
    value = WithSlots()
    value.a = 5
    found = read(pickle.dumps(value, 2))
    assert found.attributes() == {"a": 5}
    assert found.of == GlobalName(__name__, "WithSlots")


class WithArgs:
    def __new__(cls, *, name):
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (), {"name": "n"}


def test_keyword_arguments():
    found = read(pickle.dumps(WithArgs(name=1), 4))
    assert found.name == f"{__name__}.WithArgs" and found.kwargs == {"name": "n"}


def test_nothing_is_imported():
    before = set(sys.modules)
    read(b"cantigravity\nfly\n)R.")
    read(b"\x80\x04\x8c\x04this\x8c\x01s\x93.")
    assert "antigravity" not in sys.modules and "this" not in set(sys.modules) - before


def test_nothing_is_looked_up(monkeypatch):
    """Neither ``__import__`` nor ``getattr`` is given any name of a pickle."""
    real, asked = builtins.__import__, []
    data = pickle.dumps([Runs(os.mkdir, "x"), defaultdict(list), np.arange(3)])
    monkeypatch.setattr(builtins, "__import__", lambda name, *a, **k: asked.append(name) or real(name, *a, **k))
    node(data)
    assert not {"os", "posix", "collections", "numpy._core.multiarray"} & set(asked)


@pytest.mark.parametrize("data", [b"\x82\x01.", b"\x83\x01\x01.", b"\x84\x01\x01\x01\x01.", b"\x97.", b"\x80\x05\x97\x98.", b"\x80\x06N."])
def test_what_needs_more_than_the_pickle_is_refused(data):
    with pytest.raises(FormatError, match="pickle needs"):
        read(data)


def test_persistent_ids():
    assert read(b"P12\n.") == Persistent("12")
    assert read(b"\x80\x02](X\x01\x00\x00\x00a\x85Qe.") == [Persistent(("a",))]


# ------------------------------------------------------------------------------------------------------------- bombs

LENGTHS = [b"T", b"X", b"B", b"\x8b", b"\x8d", b"\x8e", b"\x96", b"\x95"]


@pytest.mark.parametrize("op", LENGTHS)
@pytest.mark.parametrize("length", [2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1])
def test_huge_lengths_take_no_memory(op, length):
    size = 8 if op in (b"\x8d", b"\x8e", b"\x96", b"\x95") else 4
    data = op + (length % 2 ** (8 * size)).to_bytes(size, "little") + b"x" * 50 + b"."
    with pytest.raises(CorruptError):
        read(data)


def peak(data: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(CkptError):
            node(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_huge_place_in_the_memo_takes_no_memory():
    assert peak(b"Nr\xff\xff\xff\xff0") < 1 << 20
    assert read(b"Nr\xff\xff\xff\xff0j\xff\xff\xff\xff.") is None


def test_places_in_the_memo_have_few_digits():
    """Numbers that differ by multiples of 2**61 - 1 have one hash: a dict of n of them takes n² steps."""
    assert read(b"I7\np4294967295\n0g4294967295\n.") == 7
    for code in (b"p", b"g"):
        with pytest.raises(CorruptError, match="more than 10 digits"):
            read(b"N" + code + b"%d\n." % ((1 << 61) - 1))


@pytest.mark.filterwarnings("error")
def test_an_unknown_escape_is_damage_where_warnings_are_errors():
    with pytest.raises(CorruptError, match="invalid escape"):
        read(b"S'\\d'\n.")


def laughs(unit: bytes, times: int) -> bytes:
    """Lists of ten references to the list before."""
    body = b"(" + unit * 10 + b"l" + b"q\x00"
    return b"\x80\x02" + body + b"".join(b"0(" + b"h\x00" * 10 + b"lq\x00" for _ in range(times)) + b"."


def test_a_few_bytes_that_unfold_to_very_many():
    data = laughs(b"N", 30)
    assert isinstance(read(data), list)
    assert peak(data) < 20 << 20


def test_bytes_that_are_copied_over_and_over():
    big = b"C" + b"\xff" + b"x" * 255 + b"q\x00"
    with pytest.raises(CorruptError, match="unfold"):
        node(b"\x80\x03(" + big + b"h\x00" * 10_000 + b"l.")


DEPTH = 100_000
DEEP = {
    "tuples": b")" + b"\x85" * DEPTH + b".",
    "lists": b"]" * DEPTH + b"a" * (DEPTH - 1) + b".",
    "calls": b"cx\ny\n" + b")R" * DEPTH + b".",
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_nesting(name):
    found = read(DEEP[name])
    with pytest.raises(CorruptError):
        node(DEEP[name])
    del found  # freeing it must not overflow the stack either


@pytest.mark.parametrize("target", [b"}", b"ccollections\nOrderedDict\n)R"])
def test_deep_and_wide_keys_are_not_hashed(target):
    deep = b")" + b"\x85" * 50_000
    with pytest.raises(CorruptError, match="too many parts"):
        read(target + deep + b"Ns.")
    wide = b"(" + b"N" * 100 + b"tq\x00" + b"0(" + b"h\x00" * 100 + b"tq\x00" + b"0(" + b"h\x00" * 100 + b"t"
    with pytest.raises(CorruptError, match="too many parts"):
        read(target + wide + b"Ns.")


def test_keys_in_arguments_are_not_hashed_either():
    deep = b")" + b"\x85" * 50_000
    for call in (b"ccollections\nOrderedDict\n]](" + deep + b"Neat\x85R.", b"cbuiltins\nset\n](" + deep + b"e\x85R."):
        data = b"\x80\x02" + call.replace(b"t\x85R.", b"a\x85R.")
        with pytest.raises(CorruptError):
            node(data)


def test_long_integers():
    with pytest.raises(CorruptError, match="digits"):
        read(b"L" + b"9" * 5000 + b"L\n.")
    with pytest.raises(CorruptError, match="integer of"):
        read(b"\x8b" + struct.pack("<I", 1 << 20) + bytes(1 << 20) + b".")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"N",
        b"NN.",
        b"(N.",
        b"R.",
        b"h\x05.",
        b"Na.",
        b"NNNs.",
        b"(NNNu.",
        b"}(Nu.",
        b"]NNs.",
        b"Nb.",
        b"NNb.",
        b"}}b.",
        b"N)R.",
        b"cos\nmkdir\nNR.",
        b"\x85.",
        b"I1x\n.",
        b"Fnope\n.",
        b"S'a\n.",
        b"Sa\n.",
        b"c\n\n.",
        b"cos\n\x01\n.",
        b"NN\x93.",
        b"\x8f(]\x90.",
        b"(]\x91.",
        b"1.",
        b"0.",
        b"\xff.",
        b"X\x01\x00\x00\x00\xff.",
        b"cx\ny\n)RNb}b}b.",
        b"}]Ns.",
        b"2.",
    ],
)
def test_broken_pickles(data):
    with pytest.raises(CorruptError) as caught:
        read(data)
    assert caught.value.where == "there" and caught.value.hint


@given(st.binary(max_size=200))
def test_any_bytes_end_in_a_value_or_an_error(data):
    with contextlib.suppress(CkptError):
        node(data + b".")


SAMPLE = pickle.dumps({"a": [1, 2.5, ("x", b"y")], 3: OrderedDict(z=np.arange(3)), "s": {1, 2}, "m": Runs(os.mkdir, "/x")}, 2)


@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_damaged_pickles_end_in_a_value_or_an_error(changes):
    data = bytearray(SAMPLE)
    for at, byte in changes:
        data[at] = byte
    with contextlib.suppress(CkptError):
        node(bytes(data))


# -------------------------------------------------------------------------------------------------------------- tensors


def storage(count: int, kind: str = "FloatStorage") -> Persistent:
    return Persistent(("storage", GlobalName("torch", kind), "0", "cpu", count))


def tensor(*args) -> Made:
    return Made(GlobalName("torch._utils", "_rebuild_tensor_v2"), args)


def test_a_tensor():
    found = PickleValues("there").meaning(tensor(storage(10), 2, (2, 3), (3, 1), False, Made(GlobalName("collections", "OrderedDict"))))
    assert isinstance(found, StoredView)
    assert (found.dtype, found.offset, found.shape, found.strides, found.storage.nbytes) == ("float32", 2, (2, 3), (3, 1), 40)


@pytest.mark.parametrize(
    "made",
    [
        tensor(storage(10), 5, (2, 3), (3, 1), False, None),
        tensor(storage(10), -1, (2, 3), (3, 1), False, None),
        tensor(storage(10), 0, (2, -3), (3, 1), False, None),
        tensor(storage(10), 0, (2, 3), (-3, 1), False, None),
        tensor(storage(10), 0, (2, 3), (3,), False, None),
        tensor(storage(10), 0, (2.0, 3), (3, 1), False, None),
        tensor(storage(10), 0, (1 << 40, 1 << 40), (0, 0), False, None),
        tensor(storage(10), 0, (1 << 70,), (1,), False, None),
        tensor(storage(-1), 0, (1,), (1,), False, None),
        tensor(storage(10), 0, [[2], 3], (3, 1), False, None),
        tensor(storage(10), 0),
        tensor("storage", 0, (1,), (1,), False, None),
        tensor(Persistent(("storage",)), 0, (1,), (1,), False, None),
        tensor(Persistent("0"), 0, (1,), (1,), False, None),
        Made(GlobalName("torch", "Size"), ("x",)),
        Made(GlobalName("torch", "Size"), ()),
        Made(GlobalName("numpy.core.multiarray", "scalar"), (Made(GlobalName("numpy", "dtype"), ("f8",)), b"1234")),
        Made(GlobalName("_codecs", "encode"), ("x", "rot13")),
        Made(GlobalName("_codecs", "encode"), (b"x", "latin1")),
        Made(GlobalName("builtins", "complex"), ("1", "2")),
        Made(GlobalName("collections", "OrderedDict"), ([1, 2],)),
        Made(GlobalName("torch._tensor", "_rebuild_from_type_v2"), (1,)),
    ],
)
def test_arguments_that_cannot_be(made):
    with pytest.raises(CorruptError):
        PickleValues("there").meaning(made)


@pytest.mark.parametrize(
    "made",
    [
        Made(GlobalName("torch._utils", "_rebuild_sparse_tensor"), (1, 2)),
        Made(GlobalName("torch._utils", "_rebuild_qtensor"), (1, 2)),
        Made(GlobalName("torch.storage", "_load_from_bytes"), (b"x",)),
        tensor(storage(10, "QInt8Storage"), 0, (1,), (1,), False, None),
    ],
)
def test_tensors_of_unknown_kinds_are_errors(made):
    with pytest.raises(FormatError, match="not known here"):
        PickleValues("there").meaning(made)


def test_a_storage_that_no_tensor_uses_is_an_error():
    with pytest.raises(FormatError, match="storage outside"):
        NodeMaker(PickleValues("there"), lambda found, path: None, pickle_bytes=9).root({"a": Made(GlobalName("x", "y"), (storage(1),))})


def test_recursive_parameters_end():
    made = tensor(storage(10), 0, (1,), (1,), False, None)
    for _ in range(100_000):
        made = Made(GlobalName("torch._utils", "_rebuild_parameter"), (made, True, None))
    with pytest.raises(CorruptError):
        PickleValues("there").meaning(made)


# ------------------------------------------------------------------------------------------------- time and memory of small ones

SHARED = ()
for _ in range(200):
    SHARED = (SHARED, SHARED)  # its text would have more characters than there are atoms


@pytest.mark.parametrize(
    "made",
    [
        Made(GlobalName("torch", "device"), (SHARED,)),
        Made(GlobalName("torch", "Size"), (SHARED,)),
        Made(GlobalName("torch", "Size"), (Persistent(SHARED),)),
        Made(GlobalName("torch._tensor", "_rebuild_from_type_v2"), (GlobalName("a", "b"), SHARED, (), None)),
        Made(
            GlobalName("torch._tensor", "_rebuild_from_type_v2"),
            (GlobalName("torch._utils", "_rebuild_wrapper_subclass"), SHARED, (SHARED,), None),
        ),
        Made(GlobalName("_codecs", "encode"), ("x", SHARED)),
        tensor(storage(10), SHARED, (1,), (1,), False, None),
        tensor(storage(10), 0, (SHARED,), (1,), False, None),
        tensor(storage(10), 0, (1,), (1,), False, None, {(1,): True}),
    ],
)
def test_no_message_has_the_text_of_what_is_in_a_file(made):
    with pytest.raises((CorruptError, FormatError)) as error:
        PickleValues("there").meaning(made)
    assert len(str(error.value)) < 1000


def test_a_long_key_is_not_copied_for_all_that_lies_below_it():
    long = b"X" + struct.pack("<I", 1 << 20) + b"k" * (1 << 20)
    for many in (b"K\x00" * 100_000, b"cos\nsystem\nq\x00" + b"h\x00" * 20_000):
        data = b"\x80\x02}" + long + b"](" + many + b"es."
        with pytest.raises(FormatError, match="more than 4096 characters"):
            node(data)


def test_shared_text_and_names_that_unfold_to_very_much():
    long = b"X" + struct.pack("<I", 1 << 16) + b"k" * (1 << 16) + b"q\x00"
    with pytest.raises(CorruptError, match="unfold"):
        node(b"\x80\x02(" + long + b"h\x00" * 1_000_000 + b"l.")
    key = b"X" + struct.pack("<I", 4000) + b"k" * 4000
    with pytest.raises(CorruptError, match="unfold"):
        node(b"\x80\x02}" + key + b"](cos\nsystem\nq\x00" + b"h\x00" * 100_000 + b"es.")


PRIME = (1 << 61) - 1


def long_int(value):
    data = value.to_bytes(200, "little", signed=True).rstrip(b"\0") + b"\0"
    return b"\x8a" + bytes([len(data)]) + data


ALIKE = [long_int(PRIME * (i + 1)) for i in range(2000)]


@pytest.mark.parametrize(
    "data",
    [
        b"}(" + b"".join(key + b"N" for key in ALIKE) + b"u.",
        b"}" + b"".join(key + b"Ns" for key in ALIKE) + b".",
        b"}(" + b"".join(key + b"\x85N" for key in ALIKE) + b"u.",
        b"\x8f(" + b"".join(ALIKE) + b"\x90.",
        b"ccollections\nOrderedDict\n)R(" + b"".join(key + b"N" for key in ALIKE) + b"u.",
        b"cbuiltins\nset\n](" + b"".join(ALIKE) + b"e\x85R.",
    ],
)
def test_keys_that_would_take_long_to_tell_apart(data):
    with pytest.raises(CorruptError, match="as a key"):
        node(b"\x80\x04" + data)


def test_other_keys_are_as_good_as_before():
    value = {i << 40: 0 for i in range(5000)} | {(i, -1): 0 for i in range(5000)} | {2.0**i: 0 for i in range(62, 900)} | {-(2**200): 0}
    assert read(pickle.dumps([value, {**value}])) == [value, value]
    assert node(pickle.dumps(value)) == tree.encode(value, "", lambda value, path: None)


def test_a_mesh_of_very_many_ranks_takes_no_memory():
    def made(name, **attributes):
        return Made(GlobalName("torch.distributed.tensor", name), (), state=attributes)

    def dtensor(ranks, at, placement=None):
        layout = made("_MeshLayout", shape=(ranks,))
        mesh = made("DeviceMesh", _layout=layout, _coordinate_on_dim=[at])
        spec = made("DTensorSpec", mesh=mesh, placements=(placement or made("placement_types.Shard", dim=0),))
        state = {"_spec": spec, "_local_tensor": tensor(storage(10), 0, (1,), (1,), False, None)}
        args = (GlobalName("torch.distributed.tensor", "DTensor"), GlobalName("torch", "float32"), (1 << 40,))
        inner = (GlobalName("torch._utils", "_rebuild_wrapper_subclass"), args[0], args, state)
        return Made(GlobalName("torch._tensor", "_rebuild_from_type_v2"), inner)

    found = PickleValues("there").meaning(dtensor(1 << 40, 5))
    assert [offset for offset, _ in found.boxes] == [(5,)]
    for ranks, at in ((0, 0), (4, 4)):
        with pytest.raises(CorruptError):
            PickleValues("there").meaning(dtensor(ranks, at))
    for dim, groups, error in ((0, 1 << 40, FormatError), (0, 0, CorruptError), (1, 2, CorruptError), (0, 2, CorruptError)):
        strided = made("placement_types._StridedShard", dim=dim, split_factor=groups)
        with pytest.raises(error):
            PickleValues("there").meaning(dtensor(1 << 40, 5, strided))
