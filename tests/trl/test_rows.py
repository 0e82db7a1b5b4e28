"""What belongs to some rows of a micro-batch goes where they go."""

from __future__ import annotations

import pytest
import torch

from fastgrpo.objective import Objective, RowTerms
from fastgrpo.trl.fused import FusedLoss
from fastgrpo.trl.images import ImagesByRow
from fastgrpo.trl.rows import Rows

IDS = torch.arange(1, 21).view(4, 5)
MASK = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
COUNTED = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1]]).bool()
ADVANTAGES = torch.arange(8.0).view(4, 2)


def everything() -> Rows:
    """Four rows with all that rows may have."""
    loss = FusedLoss(Objective(), RowTerms(advantages=ADVANTAGES, token_weights=2 * ADVANTAGES), COUNTED)
    images = ImagesByRow({"pixel_values": torch.arange(4.0).view(4, 1, 1, 1)}, 4)
    return Rows(IDS, MASK, 2, COUNTED, loss, images)


def assert_are(some: Rows, numbers: list[int]) -> None:
    for name, values, expected in (
        ("ids", some.input_ids, IDS),
        ("mask", some.attention_mask, MASK),
        ("counted", some.counted, COUNTED),
        ("counted by the loss", some.fused_loss.counted, COUNTED),
        ("advantages", some.fused_loss.terms.advantages, ADVANTAGES),
        ("images", some.images.arguments()["pixel_values"].flatten(), torch.arange(4.0)),
    ):
        assert torch.equal(values, expected[numbers]), (name, values)
    assert len(some) == len(numbers) and some.width == 2


def test_what_belongs_to_rows_is_taken_with_them():
    assert_are(everything().take(torch.tensor([2, 0])), [2, 0])


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (1, [[0], [1], [2], [3]]),
        (3, [[0, 1, 2], [3]]),
        (4, [[0, 1, 2, 3]]),
        (9, [[0, 1, 2, 3]]),
    ],
)
def test_every_so_many_rows(size, parts):
    split = everything().split(size)
    assert len(split) == len(parts)
    for some, numbers in zip(split, parts, strict=True):
        assert_are(some, numbers)


def test_what_rows_do_not_have_their_parts_do_not_have():
    for some in (*Rows(IDS, MASK, 2).split(2), Rows(IDS, MASK, 2).take(torch.tensor([1]))):
        assert some.counted is some.fused_loss is some.images is None


def test_parts_of_a_loss_put_it_in_one_place():
    rows = everything()
    assert all(some.fused_loss.found is rows.fused_loss.found for some in rows.split(2))


def test_tokens_of_completions_are_scored_and_those_that_the_loss_counts_are_computed():
    scored = MASK.bool() & torch.tensor([False, False, False, True, True])
    assert torch.equal(Rows(IDS, MASK, 2).scored, scored)
    assert torch.equal(Rows(IDS, MASK, 2).computed, scored)
    rows = everything()
    assert torch.equal(rows.last(rows.computed), scored[:, 3:] & COUNTED)
    assert not rows.computed[:, :3].any()
    assert rows.labels().flatten().tolist() == [
        int(token) if computed else -100 for token, computed in zip(IDS.flatten(), rows.computed.flatten(), strict=True)
    ]


def test_a_loss_is_laid_out_from_all_columns():
    loss = everything().laid_out_loss(lambda values: values.flatten())
    assert loss.terms.advantages.view(4, 5)[:, 3:].equal(ADVANTAGES)
    assert not loss.terms.advantages.view(4, 5)[:, :3].any()
    assert Rows(IDS, MASK, 2).laid_out_loss(lambda values: values) is None


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([[0, 1, 1, 0], [1, 1, 1, 1]], False),
        ([[0, 1, 0, 0], [1, 1, 1, 1]], False),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], False),
        ([[0, 0, 1, 1], [1, 1, 1, 1]], True),
        ([[0, 0, 0, 0], [0, 0, 0, 0]], True),
    ],
)
def test_a_first_token_that_is_to_be_scored_needs_its_padding(mask, expected):
    assert Rows(IDS[:2, :4], torch.tensor(mask), 2).cannot_be_packed() is expected
