"""Flat buffers against a literal transcript of what Megatron-Core does with real arrays, and against its own account of a buffer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import FormatError
from ckpt.formats.megatron.buffers import Bucket, BufferLayout, BufferParam, Slot, buffer_layout, layout_in, shifts
from ckpt.formats.megatron.names import LocalNames, extra_states, fused_norms, order_key, tensor_parallel_axis
from ckpt.formats.megatron.parallel_layout import layers_of_chunks
from ckpt.formats.megatron.stored_buffers import job_layout

NUMELS = st.lists(st.integers(1, 300), min_size=1, max_size=12)


Places = list[tuple[int, int, int]]


def transcript(numels: list[int], shared: list[bool], bucket_size: int | None, ranks: int) -> tuple[Places, list[list[int]]]:
    """(start, end, bucket) of each parameter in the model's order, and (start, end, end without padding) of each bucket."""
    places: Places = []
    buckets: list[list[int]] = []
    start = opened = 0
    waiting = False

    def close(end: int) -> int:
        nonlocal opened, waiting
        padded = math.ceil(end / math.lcm(ranks, 128)) * math.lcm(ranks, 128)
        buckets.append([opened, padded, end])
        opened, waiting = padded, False
        return padded

    end = 0
    for numel, own in zip(numels[::-1], shared[::-1], strict=True):
        start = math.ceil(start / 64) * 64
        if own and waiting:
            start = close(start)
        end = start + numel
        places.append((start, end, len(buckets)))
        waiting = True
        start = close(end) if own or (bucket_size is not None and end - opened >= bucket_size) else end
    if waiting:
        close(end)
    return places[::-1], buckets


@given(NUMELS, st.data(), st.one_of(st.none(), st.integers(1, 600)), st.integers(1, 6))
def test_buffers_are_laid_out_as_in_megatron(numels, data, bucket_size, ranks):
    shared = data.draw(st.lists(st.booleans(), min_size=len(numels), max_size=len(numels)))
    places, buckets = transcript(numels, shared, bucket_size, ranks)
    members = [BufferParam(n, s) for n, s in zip(numels, shared, strict=True)]
    layout = buffer_layout(members, bucket_size=bucket_size, data_parallel=ranks)
    assert layout.slots == tuple(Slot(start, bucket) for start, _, bucket in places)
    assert layout.buckets == tuple(Bucket(end - start, used - start) for start, end, used in buckets)
    assert layout_in(members, layout.buckets) == layout


def test_a_buffer_that_megatron_told_of():
    """Written down by Megatron-Core 0.16.1: two layers on two data-parallel ranks, buckets of 20,000 elements."""
    numels = [16384, 64, 4096, 8192, 64, 12288, 6144, 64, 4096, 8192, 64, 12288, 6144, 64, 16384]
    layout = buffer_layout([BufferParam(n) for n in numels], bucket_size=20000, data_parallel=2)
    assert layout.buckets == (Bucket(22656, 22592), Bucket(20608, 20544), Bucket(22656, 22592), Bucket(28800, 28800))
    assert layout.slots[0] == Slot(78336, 3)
    assert layout.slots[11] == Slot(22656, 1)
    assert layout.used == 94528


def test_other_buckets_are_not_taken():
    members = [BufferParam(100), BufferParam(60)]
    assert layout_in(members, [Bucket(128, 60), Bucket(128, 100)]) is not None
    others = [[(256, 160)], [(128, 60), (128, 99)], [(128, 60)], [], [(128, 60), (128, 100), (128, 1)]]
    for sizes in others:
        buckets = [Bucket(*size) for size in sizes]
        assert layout_in(members, buckets) is None


@given(NUMELS, st.one_of(st.none(), st.integers(1, 600)), st.integers(1, 6))
def test_displaced_elements_are_found_again(numels, bucket_size, ranks):
    """What Megatron-Core 0.16.1 does (sharded_param_state_fully_reshardable), on an array of distinct numbers, and back."""
    layout = buffer_layout([BufferParam(n) for n in numels], bucket_size=bucket_size, data_parallel=ranks)
    compact = np.arange(1, layout.used + 1)
    written = []
    for slot, numel in zip(layout.slots, numels, strict=True):
        part = compact[slot.start : slot.start + numel]
        written.append(np.pad(part, (0, numel - len(part))))
    truth = [compact[layout.compact(s) : layout.compact(s) + n] for s, n in zip(layout.slots, numels, strict=True)]
    repaired = [np.full(n, -1) for n in numels]
    for shift in shifts(layout, numels):
        if shift.written_as is None:
            lost = truth[shift.member][shift.start : shift.stop]
            assert not any(np.isin(lost, w).any() for w in written)
            repaired[shift.member][shift.start : shift.stop] = lost
        else:
            repaired[shift.member][shift.start : shift.stop] = written[shift.written_as][shift.at : shift.at + shift.stop - shift.start]
    for found, expected in zip(repaired, truth, strict=True):
        assert np.array_equal(found, expected)


def test_nothing_moves_in_one_bucket():
    layout = BufferLayout((Slot(64, 0), Slot(0, 0)), (Bucket(256, 164),))
    assert all(s.written_as == s.member and s.start == s.at == 0 for s in shifts(layout, [100, 64]))


# -------------------------------------------------------------------------------------------------- layers and names


@pytest.mark.parametrize(
    ("arguments", "layers", "stages", "chunks", "expected"),
    [
        ({}, 4, 2, 2, [1, 1, 1, 1]),
        ({}, 6, 3, 1, [2, 2, 2]),
        ({"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}, 8, 4, 1, [1, 2, 2, 3]),
        ({"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}, 6, 2, 2, [1, 2, 2, 1]),
        ({"pipeline_model_parallel_layout": "Et*3|(tt|)*2,m|L"}, 7, 5, 1, [3, 2, 2, 0, 0]),
        ({"pipeline_model_parallel_layout": "Et|(tt|)*2tL"}, 6, 2, 2, [1, 2, 2, 1]),
    ],
)
def test_layers_of_stages(arguments, layers, stages, chunks, expected):
    assert layers_of_chunks(arguments, layers, stages, chunks) == expected


def test_layers_that_cannot_be_divided():
    with pytest.raises(FormatError, match="7 layers on 2 pipeline stages"):
        layers_of_chunks({}, 7, 2)


def test_norms_belong_to_what_follows():
    at = "decoder.layers.0."
    names = ["input_layernorm.weight", "self_attention.linear_qkv.weight", "pre_mlp_layernorm.bias", "mlp.linear_fc1.weight"]
    assert list(fused_norms([at + n for n in names]).values())[::2] == [
        at + "self_attention.linear_qkv.layer_norm_weight",
        at + "mlp.linear_fc1.layer_norm_bias",
    ]
    routed = fused_norms([at + "mlp.router.weight", at + "mlp.linear_fc1.layer_norm_weight"])
    assert routed[at + "mlp.linear_fc1.layer_norm_weight"] == at + "pre_mlp_layernorm.weight"
    latent = [at + "input_layernorm.weight", at + "self_attention.linear_q_proj.weight"]
    assert list(fused_norms(latent)) == list(fused_norms(latent).values())
    of_heads = [at + f"self_attention.{n}.weight" for n in ("q_layernorm", "kv_layernorm", "linear_q_up_proj")]
    found = fused_norms(of_heads)
    assert found[of_heads[0]] == at + "self_attention.linear_q_up_proj.layer_norm_weight" and found[of_heads[1]] == of_heads[1]


def test_buckets_of_a_job():
    """They matter where parameters are no multiples of 64, and only on the first stage, and where reductions overlap."""
    members = [BufferParam(100), BufferParam(70), BufferParam(30)]  # in reverse 30, 70 and 100
    one = [192, 64, 0]
    for arguments, bucketed, expected in (
        ({}, True, one),
        ({"overlap_grad_reduce": True, "ddp_bucket_size": 90}, False, one),
        ({"overlap_grad_reduce": True, "ddp_bucket_size": 90}, True, [134, 64, 0]),
        ({"overlap_grad_reduce": False, "ddp_bucket_size": 90}, True, one),
        ({"overlap_grad_reduce": True}, True, one),
    ):
        layout = job_layout(members, arguments, bucketed=bucketed)
        assert layout is not None and [layout.compact(s) for s in layout.slots] == expected, arguments
    large = [BufferParam(64), BufferParam(70), BufferParam(50_000_001)]
    assert job_layout(large, {"overlap_grad_reduce": True}, bucketed=True) is None
    assert job_layout(large, {"overlap_grad_reduce": True, "ddp_bucket_size": 60_000_000}, bucketed=True) is not None


def test_names_on_a_rank():
    """Where Megatron-Core's layer specifications have what the whole model has under one name."""
    local, fused, grouped = LocalNames(fused=False), LocalNames(), LocalNames(experts="grouped")
    at = "decoder.layers.7."
    for name, here, other in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", None),
        ("mlp.linear_fc1.layer_norm_bias", "pre_mlp_layernorm.bias", None),
        ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight", None),
        ("self_attention.q_layernorm.weight", "self_attention.q_layernorm.weight", None),
        ("mlp.experts.local_experts.5.linear_fc1.bias", "mlp.experts.local_experts.1.linear_fc1.bias", "mlp.experts.linear_fc1.bias1"),
    ):
        assert local.name(at + name, first_layer=5, first_expert=4) == f"decoder.layers.2.{here}"
        kept = other or name
        assert grouped.name(at + name, first_layer=7, first_expert=4) == f"decoder.layers.0.{kept}"
        if other is None:
            assert fused.name(at + name, first_layer=0, first_expert=0) == at + name
    assert fused.name("output_layer.weight", first_layer=3, first_expert=0) == "output_layer.weight"
    names = ["decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "output_layer.weight"]
    names += ["decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.experts.linear_fc2.weight1", "decoder.final_layernorm.weight"]
    assert extra_states(names) == [
        "decoder.layers.0.mlp.linear_fc1._extra_state",
        "output_layer._extra_state",
        "decoder.layers.0.mlp.experts.linear_fc2._extra_state",
    ]


def test_the_order_of_parameters():
    """As Megatron-Core lists them: norms of their own, experts one by one; or Transformer Engine's fused and grouped layers."""
    at = "decoder.layers.0."
    shared = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
    first, second = (at + f"mlp.experts.local_experts.{i}.linear_fc1.weight" for i in (0, 1))
    down = at + "mlp.experts.local_experts.0.linear_fc2.weight"
    norm, proj, qkv = (at + f"self_attention.{n}" for n in ("linear_qkv.layer_norm_weight", "linear_proj.weight", "linear_qkv.weight"))
    local = [shared[0], norm, proj, qkv, at + "pre_mlp_layernorm.weight", at + "mlp.router.weight", first, down, second, *shared[1:]]
    grouped = [shared[0], proj, norm, qkv, at + "pre_mlp_layernorm.weight", at + "mlp.router.weight", first, second, down, *shared[1:]]
    assert sorted(grouped, key=lambda n: order_key(n, ("local", False))) == local
    assert sorted(local, key=lambda n: order_key(n, ("fused", True))) == grouped
    with pytest.raises(KeyError):
        order_key(at + "mixer.conv1d.weight", ("local", False))


def test_parameters_that_are_cut():
    assert tensor_parallel_axis("decoder.layers.0.mlp.shared_experts.linear_fc2.weight") == 1
    assert tensor_parallel_axis("decoder.layers.0.self_attention.linear_proj.bias") is None
    assert tensor_parallel_axis("decoder.layers.0.self_attention.q_layernorm.weight") is None
    with pytest.raises(KeyError):
        tensor_parallel_axis("decoder.layers.0.mixer.conv1d.weight")
