"""Claims about packing: real tokens move together in order, nothing else changes, and it can be undone."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fastgrpo import left_pack, pack, pack_ops, unpack
from fastgrpo.pack_ops import _pattern, take_rows_op
from fastgrpo.packing import _GATHERED, take_rows

masks = st.tuples(st.integers(0, 5), st.integers(0, 12)).flatmap(
    lambda shape: arrays("int64", shape, elements=st.integers(0, 1))
)


@settings(max_examples=200)
@given(masks)
def test_rows_keep_their_real_tokens_in_order_and_restoring_is_the_exact_inverse(mask):
    mask = torch.from_numpy(mask)
    ids = torch.arange(mask.numel()).view(mask.shape) + 7
    packed = left_pack(ids, mask)
    for row, row_mask, new_row, new_mask in zip(ids, mask, packed.input_ids, packed.attention_mask, strict=True):
        real = row[row_mask.bool()]
        assert torch.equal(new_row[: len(real)], real)
        assert new_mask[: len(real)].eq(1).all() and new_mask[len(real) :].eq(0).all()
    longest = int(mask.sum(1).max()) if mask.numel() else 0
    assert packed.input_ids.shape[1] == (max(longest, 1) if mask.numel() else 0)
    assert torch.equal(packed.position_ids, torch.arange(packed.input_ids.shape[1]).expand_as(packed.input_ids))

    values = torch.randn(mask.shape)
    restored = packed.restore(packed.take(values), fill=-5.0)
    assert torch.equal(restored, torch.where(mask.bool(), values, -5.0))


def test_padding_is_known_from_the_mask_not_from_token_ids():
    pad = 0
    ids = torch.tensor([[pad, pad, 5, pad, 6, pad]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0]])
    assert left_pack(ids, mask).input_ids.tolist() == [[5, pad, 6]]


def test_integers_come_back_as_they_were():
    ids, mask = torch.tensor([[0, 2**24 + 1, 3]]), torch.tensor([[0, 1, 1]])
    packed = left_pack(ids, mask)
    assert torch.equal(packed.restore(packed.input_ids), ids)


def test_gradients_flow_to_real_tokens_only():
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]])
    packed = left_pack(torch.zeros(2, 3, dtype=torch.long), mask)
    values = torch.randn(2, 2, requires_grad=True)
    weights = torch.arange(6.0).view(2, 3) + 1
    (packed.restore(values) * weights).sum().backward()
    assert values.grad.tolist() == [[2.0, 3.0], [6.0, 0.0]]


def test_what_the_model_computed_on_padding_does_no_harm():
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]])
    packed = left_pack(torch.zeros(2, 3, dtype=torch.long), mask)
    values = torch.tensor([[1.0, 2.0], [3.0, float("nan")]], requires_grad=True)
    restored = packed.restore(values)
    assert restored.tolist() == [[0.0, 1.0, 2.0], [0.0, 0.0, 3.0]]
    restored.sum().backward()
    assert values.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_the_mask_keeps_its_dtype(dtype):
    mask = torch.tensor([[0, 1, 1]]).to(dtype)
    assert left_pack(torch.zeros(1, 3, dtype=torch.int32), mask).attention_mask.dtype == dtype


@pytest.mark.parametrize(
    ("ids", "mask", "error", "message"),
    [
        (torch.zeros(3, dtype=torch.long), torch.ones(3), ValueError, r"input_ids has shape \(3,\).*\[B, L\]"),
        (
            torch.zeros(2, 3, dtype=torch.long),
            torch.ones(2, 4, dtype=torch.long),
            ValueError,
            r"attention_mask \(2, 4\)",
        ),
        (torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.long), TypeError, "input_ids is torch.float32.*torch.int64"),
        (
            torch.zeros(2, 3, dtype=torch.long),
            torch.ones(2, 3),
            TypeError,
            "attention_mask is torch.float32.*torch.bool",
        ),
    ],
)
def test_bad_input_says_what_was_given_and_what_is_allowed(ids, mask, error, message):
    with pytest.raises(error, match=message):
        left_pack(ids, mask)


@st.composite
def prompts_and_completions(draw):
    """Rows as TRL pads them, some with the same prompt."""
    prompts = draw(st.lists(st.lists(st.integers(3, 5), min_size=0, max_size=4), min_size=1, max_size=3))
    rows = draw(
        st.lists(
            st.tuples(st.sampled_from(prompts), st.lists(st.integers(3, 9), min_size=0, max_size=5)),
            min_size=1,
            max_size=8,
        )
    )
    before, after = max(len(prompt) for prompt, _ in rows), max(len(completion) for _, completion in rows)
    ids, mask = torch.zeros(len(rows), before + after, dtype=torch.int64), torch.zeros(len(rows), before + after)
    for number, (prompt, completion) in enumerate(rows):
        start = before - len(prompt)
        tokens = [*prompt, *completion]
        ids[number, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        mask[number, start : start + len(tokens)] = 1
    return rows, ids, mask.long()


@settings(max_examples=200)
@given(batch=prompts_and_completions(), share=st.booleans())
def test_every_token_of_a_packed_batch_sees_its_own_row_and_nothing_else(batch, share):
    rows, ids, mask = batch
    lengths = torch.tensor([len(prompt) for prompt, _ in rows])
    packed = pack(ids, mask, lengths, share)
    tokens = packed.tokens[0].tolist()
    seen = {}
    for segment in packed.segments:
        prefix = list(range(segment.prefix_start, segment.prefix_stop))
        for token in range(segment.start, segment.stop):
            assert token not in seen, "a token lies in two segments"
            seen[token] = [*prefix, *range(segment.start, token + 1)]
    assert len(seen) == len(tokens)
    for number, (prompt, completion) in enumerate(rows):
        places = packed.index[number][mask[number].bool()].tolist()
        assert [tokens[place] for place in places] == [*prompt, *completion]
        assert packed.position_ids[0, places].tolist() == list(range(len(places)))
        for rank, place in enumerate(places):
            assert seen[place] == places[: rank + 1]
        previous = packed.previous()[number][mask[number].bool()].tolist()
        assert previous[1:] == places[:-1]
    once = {tuple(prompt) for prompt, _ in rows if prompt}
    prompt_tokens = sum(map(len, once)) if share else sum(len(prompt) for prompt, _ in rows)
    assert len(tokens) == prompt_tokens + sum(len(completion) for _, completion in rows)


@settings(max_examples=50)
@given(batch=prompts_and_completions(), share=st.booleans())
def test_unpack_is_the_inverse_of_pack(batch, share):
    rows, ids, mask = batch
    packed = pack(ids, mask, torch.tensor([len(prompt) for prompt, _ in rows]), share)
    assert torch.equal(unpack(packed.tokens, packed, fill=-1), ids.masked_fill(mask == 0, -1))
    assert torch.equal(packed.take(ids), packed.tokens[0])


@settings(max_examples=100)
@given(batch=prompts_and_completions(), data=st.data())
def test_prompts_are_one_where_tokens_and_what_is_beside_them_are_equal(batch, data):
    rows, ids, mask = batch
    beside = data.draw(st.lists(st.sampled_from("ab"), min_size=len(rows), max_size=len(rows)))
    lengths = torch.tensor([len(prompt) for prompt, _ in rows])
    packed = pack(ids, mask, lengths, True, beside)
    named = [(tuple(prompt), value) for (prompt, _), value in zip(rows, beside, strict=True)]
    places = [
        index[real.bool()][:length].tolist() for index, real, length in zip(packed.index, mask, lengths, strict=True)
    ]
    for one, name in enumerate(named):
        for other, other_name in enumerate(named):
            if name[0] and one != other:
                assert (places[one] == places[other]) == (name == other_name)
    assert packed.rows == [row for row, name in enumerate(named) if not name[0] or name not in named[:row]]
    assert pack(ids, mask, lengths, False, beside).rows == list(range(len(rows)))


def test_prompts_are_shared_only_where_they_are_told_apart_from_completions():
    ids = torch.tensor([[3, 4, 5], [3, 4, 6]])
    with pytest.raises(ValueError, match="share_prefix=True needs prompt_lengths"):
        pack(ids, torch.ones_like(ids), share_prefix=True)
    with pytest.raises(ValueError, match=r"prompt_lengths has shape \(3,\); it must be \[2\]"):
        pack(ids, torch.ones_like(ids), torch.tensor([1, 1, 1]))
    with pytest.raises(ValueError, match=r"prompt_lengths\[1\] is 4; the row has 3 tokens"):
        pack(ids, torch.ones_like(ids), torch.tensor([1, 4]))
    with pytest.raises(ValueError, match="beside has 3 entries; it must have 2"):
        pack(ids, torch.ones_like(ids), torch.tensor([2, 2]), True, ["a", "b", "c"])
    packed = pack(ids, torch.ones_like(ids), torch.tensor([2, 2]), share_prefix=True)
    assert packed.tokens.tolist() == [[3, 4, 5, 6]]
    assert packed.segments == [(0, 2, 0, 0), (2, 3, 0, 2), (3, 4, 0, 2)]
    with pytest.raises(ValueError, match=r"values has shape \(5,\); it must be \[4\] or \[1, 4\]"):
        unpack(torch.zeros(5), packed)


def test_what_packing_cannot_read_is_refused():
    ids = torch.tensor([[3, 4, 5], [3, 4, 6]])
    with pytest.raises(TypeError, match=r"prompt_lengths is a list; give a torch\.Tensor"):
        pack(ids, torch.ones_like(ids), [2, 2], True)
    with pytest.raises(
        TypeError, match=r"prompt_lengths is torch\.float32; it must be one of torch\.int32, torch\.int64"
    ):
        pack(ids, torch.ones_like(ids), torch.tensor([2.0, 2.0]), True)
    packed = pack(ids, torch.ones_like(ids))
    with pytest.raises(TypeError, match="values is a NoneType"):
        unpack(None, packed)
    with pytest.raises(TypeError, match=r"packed is a LeftPacked; give what fastgrpo\.pack returned"):
        unpack(torch.zeros(6), left_pack(ids, torch.ones_like(ids)))


def test_an_empty_batch_packs_to_nothing():
    packed = pack(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int64))
    assert packed.tokens.shape == (1, 0) and packed.segments == []
    assert unpack(packed.tokens, packed).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@settings(max_examples=30)
@given(rows=st.lists(st.integers(0, 4), max_size=12))
def test_rows_taken_several_times_sum_their_gradients_in_fp32(rows, dtype):
    values = torch.randn(5, 3).to(dtype).requires_grad_()
    index = torch.tensor(rows, dtype=torch.int64)
    grad = torch.randn(len(rows), 3).to(dtype)
    taken = take_rows(values, index)
    assert torch.equal(taken, values[index])
    (found,) = torch.autograd.grad(taken, values, grad)
    wide = torch.promote_types(dtype, torch.float32)
    expected = torch.zeros(5, 3, dtype=wide).index_add_(0, index, grad.to(wide)).to(dtype)
    torch.testing.assert_close(found, expected)


IDS, MASK, LENGTHS = torch.tensor([[0, 4, 5], [3, 4, 6]]), torch.tensor([[0, 1, 1], [1, 1, 1]]), torch.tensor([1, 1])
"""Five tokens in two rows, of which the first is padded."""

NOT_READABLE = [
    (lambda x: x.tolist(), TypeError, r"{} is a list; give a torch\.Tensor"),
    (lambda x: x.to_sparse(), TypeError, r"{} is torch\.sparse_coo; give an ordinary, dense tensor"),
    (
        lambda x: torch.nested.nested_tensor([*x]) if x.dim() > 1 else x.to_sparse_coo(),
        TypeError,
        "{} is .*; give an ordinary",
    ),
    (lambda x: x.to("meta"), ValueError, "{} is on meta and has no values; give a tensor on a device"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("spoilt", "error", "message"), NOT_READABLE)
@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "prompt_lengths"])
def test_what_the_host_cannot_read_is_refused_in_words(name, spoilt, error, message):
    batch = {"input_ids": IDS, "attention_mask": MASK, "prompt_lengths": LENGTHS}
    batch[name] = spoilt(batch[name])
    with pytest.raises(error, match=message.format(name)):
        pack(**batch)
    del batch["prompt_lengths"]
    if name in batch:
        with pytest.raises(error, match=message.format(name)):
            left_pack(**batch)


@pytest.mark.parametrize("given", ["no", "", 1, 0, None])
def test_prompts_are_shared_by_a_flag_alone(given):
    with pytest.raises(TypeError, match=f"share_prefix is {given!r}; it must be True or False"):
        pack(IDS, MASK, LENGTHS, share_prefix=given)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    ("beside", "message"),
    [
        (5, "beside is a int; give a list of 2 hashable values, one for each row"),
        ({"a", "b"}, "beside is a set; give a list"),
        ({0: "a", 1: "b"}, "beside is a dict; give a list"),
        (iter("ab"), "beside is a str_ascii_iterator; give a list"),
        (torch.tensor([1, 1]), "beside is a Tensor; give a list"),
        ([[1], [1]], r"beside\[0\] is a list; give hashable values"),
        (["a", ([1],)], r"beside\[1\] is a tuple; give hashable values"),
        ([torch.tensor(1), torch.tensor(1)], r"beside\[0\] is a Tensor; give hashable values that compare as a whole"),
        (
            [(torch.tensor(1),), (torch.tensor(1),)],
            r"beside\[0\] is a tuple; give hashable values that compare as a whole",
        ),
    ],
)
def test_what_cannot_stand_beside_a_prompt_is_refused_in_words(beside, message, share):
    with pytest.raises(TypeError, match=message):
        pack(IDS, MASK, LENGTHS, share, beside)


TAKERS = {
    "LeftPacked.take": (lambda values: left_pack(IDS[:, 1:], MASK[:, 1:]).take(values), (2, 2), r"\[2, 2\]"),
    "LeftPacked.restore": (lambda values: left_pack(IDS, MASK).restore(values), (2, 3), r"\[2, 3\]"),
    "Packed.take": (lambda values: pack(IDS, MASK).take(values), (2, 3), r"\[2, 3\]"),
    "unpack": (lambda values: unpack(values, pack(IDS, MASK)), (5,), r"\[5\] or \[1, 5\]"),
}
"""What takes values beside a batch: the call, a shape that it takes, and what it says it takes."""


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("taker", TAKERS)
def test_values_that_are_not_a_batch_s_are_refused_in_words(taker):
    call, shape, allowed = TAKERS[taker]
    values = torch.zeros(shape)
    call(values)
    with pytest.raises(TypeError, match=r"values is a list; give a torch\.Tensor"):
        call(values.tolist())
    with pytest.raises(TypeError, match=r"values is torch\.sparse_coo; give an ordinary, dense tensor"):
        call(values.to_sparse())
    for dtype in (torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32):
        with pytest.raises(TypeError, match=rf"values is {dtype}; it must be one of torch\.bool, .*torch\.complex128"):
            call(torch.empty(shape, dtype=dtype))
    with pytest.raises(ValueError, match="values is on meta and the packed batch on cpu; move both to one device"):
        call(values.to("meta"))
    shorter, longer = (torch.zeros(*shape[:-1], shape[-1] + more) for more in (-1, 1))
    for other in (
        shorter,
        longer,
        torch.zeros(3, *shape),
        torch.zeros(*shape, 1),
        torch.zeros(shape[0], 1),
        torch.zeros(()),
    ):
        with pytest.raises(ValueError, match=rf"values has shape .*; it must be {allowed}\.$"):
            call(other)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", _GATHERED)
def test_values_of_every_dtype_that_is_taken_come_back(dtype):
    values, fill = torch.tensor([[1, 0, 1], [1, 1, 0]]).to(dtype), True
    packed, row = left_pack(IDS, MASK), pack(IDS, MASK)
    wanted = torch.where(MASK.bool(), values, torch.tensor(fill).to(dtype))
    for found in (packed.restore(packed.take(values), fill), unpack(row.take(values), row, fill)):
        assert found.dtype == dtype and torch.equal(found, wanted)


def _filled(dtype, fill):
    """What padding gets, from either layout."""
    packed, row = left_pack(IDS, MASK), pack(IDS, MASK)
    restored = packed.restore(torch.zeros(2, 3).to(dtype), fill=fill)
    spread = unpack(torch.zeros(5).to(dtype), row, fill=fill)
    assert restored.dtype == spread.dtype == dtype
    return restored[0, 0].item(), spread[0, 0].item()


@pytest.mark.parametrize(
    ("dtype", "fill", "allowed"),
    [
        (torch.bool, 2, "True or False"),
        (torch.bool, 0.5, "True or False"),
        (torch.uint8, -1, "a whole number from 0 to 255"),
        (torch.uint8, 256, "a whole number from 0 to 255"),
        (torch.int32, 2**31, "a whole number from -2147483648 to 2147483647"),
        (torch.int64, 1.5, f"a whole number from {-(2**63)} to {2**63 - 1}"),
        (torch.int64, 2.0**63, f"a whole number from {-(2**63)} to {2**63 - 1}"),
        (torch.int64, float("nan"), "a whole number from"),
        (torch.int64, float("-inf"), "a whole number from"),
        (torch.float16, 1e6, "a number from -65504.0 to 65504.0, an infinity or nan"),
        (torch.bfloat16, -1e39, "a number from .*, an infinity or nan"),
        (torch.float32, 10**40, "a number from .*, an infinity or nan"),
    ],
)
def test_a_fill_that_the_dtype_does_not_hold_is_refused_in_words(dtype, fill, allowed):
    message = rf"fill is {re.escape(repr(fill))}, and values is {dtype}, which does not hold it; give {allowed}"
    with pytest.raises(ValueError, match=message):
        left_pack(IDS, MASK).restore(torch.zeros(2, 3).to(dtype), fill=fill)
    with pytest.raises(ValueError, match=message):
        unpack(torch.zeros(5).to(dtype), pack(IDS, MASK), fill=fill)


@pytest.mark.parametrize("fill", ["x", "1", None, [1.0], 1j, torch.tensor([1.0])])
def test_a_fill_is_a_number(fill):
    message = f"fill is a {type(fill).__name__}; give a Python number"
    with pytest.raises(TypeError, match=message):
        left_pack(IDS, MASK).restore(torch.zeros(2, 3), fill=fill)
    with pytest.raises(TypeError, match=message):
        unpack(torch.zeros(5), pack(IDS, MASK), fill=fill)


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        (torch.bool, True),
        (torch.bool, 0),
        (torch.uint8, 255),
        (torch.int32, -1.0),
        (torch.int64, -(2**63)),
        (torch.int64, 2**53 + 1),
        (torch.float16, -65504),
        (torch.float16, float("-inf")),
        (torch.float32, True),
        (torch.float64, 0.1),
        (torch.complex64, 1.5),
    ],
)
def test_a_fill_that_the_dtype_holds_arrives_with_all_its_digits(dtype, fill):
    assert _filled(dtype, fill) == (fill, fill)
    assert all(math.isnan(x) for x in _filled(torch.bfloat16, float("nan")))


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        (torch.bool, 1.0),
        (torch.uint8, 255),
        (torch.int32, 2**31 - 1),
        (torch.int64, 2**53 + 1),
        (torch.bfloat16, 0.1),
        (torch.float32, -2.5),
        (torch.float64, 0.1),
    ],
)
def test_the_kernel_fills_with_the_bytes_that_torch_fills_with(dtype, fill):
    with torch.device("meta"):
        pattern = _pattern(fill, dtype)
    times = 8 // dtype.itemsize
    wanted = torch.zeros(times, dtype=dtype).masked_fill_(torch.ones(times, dtype=torch.bool), fill)
    assert torch.equal(torch.tensor([pattern]).view(torch.uint8), wanted.view(torch.uint8))


def test_entries_wider_than_the_kernel_s_fill_are_torch_s_to_fill(monkeypatch):
    monkeypatch.setattr(pack_ops, "_has_kernels", lambda values: True)
    values = torch.tensor([1 + 2j, 3j], dtype=torch.complex128)
    assert take_rows_op(values, torch.tensor([1, -1]), 1.5).tolist() == [3j, 1.5]


@pytest.mark.parametrize("share", [True, False])
def test_the_default_device_is_not_where_a_batch_is_packed(share):
    with torch.device("meta"):
        found, left = pack(IDS, MASK, LENGTHS, share), left_pack(IDS, MASK)
        spread, restored = unpack(found.tokens, found, fill=-1), left.restore(left.take(IDS), fill=-1)
    wanted = pack(IDS, MASK, LENGTHS, share)
    for name in ("tokens", "position_ids", "index", "real"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert found.segments == wanted.segments
    assert torch.equal(spread, IDS.masked_fill(MASK == 0, -1)) and torch.equal(restored, spread)


def test_what_packs_compiles_whatever_the_fill():
    packed, row = left_pack(IDS, MASK), pack(IDS, MASK)

    def both(values, fill):
        return packed.restore(packed.take(values), fill), unpack(row.take(values), row, fill)

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    for values, fills in ((torch.randn(2, 3), (0, 1.5, -2.5, 7)), (IDS, (0, 5, -1, 3.0))):
        for fill in fills:
            wanted = torch.where(MASK.bool(), values, fill).to(values.dtype)
            assert all(torch.equal(found, wanted) for found in compiled(values, fill))


def test_taking_rows_passes_opcheck():
    rows = torch.tensor([0, 2, 2, -1])
    torch.library.opcheck(take_rows_op, (torch.randn(3, 5, requires_grad=True), rows, 0.5))
    torch.library.opcheck(take_rows_op, (torch.ones(3, 5, dtype=torch.int64), rows, 2**53 + 1))


def test_names_beside_prompts_and_fills_may_be_numpy_s():
    packed = pack(IDS, MASK, LENGTHS, True, np.array(["a", "b"]))
    assert packed.rows == pack(IDS, MASK, LENGTHS, True, ["a", "b"]).rows
    values = torch.arange(packed.tokens.shape[1], dtype=torch.float32)
    for fill in (np.float32(1.5), torch.tensor(1.5)):
        assert torch.equal(unpack(values, packed, fill=fill), unpack(values, packed, fill=1.5))


def test_batches_of_gradients_of_unpacked_values():
    packed = pack(IDS, MASK, LENGTHS)
    values = torch.randn(packed.tokens.shape[1], requires_grad=True)
    out = unpack(values, packed)
    grads = torch.randn(3, *out.shape)
    (found,) = torch.autograd.grad(out, values, grads, is_grads_batched=True, retain_graph=True)
    assert torch.equal(found, torch.stack([torch.autograd.grad(out, values, g, retain_graph=True)[0] for g in grads]))
