"""`mini_batch_size` and `max_tokens_per_microbatch` where rows have images: every row with its own, the same results."""

from __future__ import annotations

import gc
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from outcomes import assert_same, generated, gradients_of, outcome, seen_by
from peft import LoraConfig
from test_parts import Alive
from tiny import tiny_trainer
from tiny_images import OTHERS, other_batch, other_model, vision_settings
from torch import Tensor
from trl import GRPOTrainer
from twins import twins

import fastgrpo
import fastgrpo.trl.compat as compat
from fastgrpo.trl.compat import SCORING_METHOD
from fastgrpo.trl.images import ImagesByRow
from fastgrpo.trl.onpolicy import score_again

# Every four rows that TRL scores together have an image: without one, its Qwen2.5-VL fails.
COUNTS = [0, 1, 3, 1, 3, 1]
TWINS = {
    "one sequence": ({"mini_batch_size": 1}, {"num_iterations": 2, "beta": 0.04}),
    "tokens, full, checkpointing": ({"max_tokens_per_microbatch": 40}, {"lora": False, "gradient_checkpointing": True}),
}


@pytest.mark.parametrize("case", TWINS)
def test_in_parts_it_trains_as_stock_does(case, tmp_path):
    options, settings = TWINS[case]
    twins(tmp_path, options=options, max_steps=2, num_generations=2, **settings, **vision_settings(COUNTS))


def batch_of(trainer: GRPOTrainer) -> dict[str, Any]:
    """Eight rows with 0, 1 and 3 images, generated."""
    batch = generated(trainer)
    assert len(batch["num_images"]) == 8 and set(batch["num_images"]) == {0, 1, 3}
    return batch


@pytest.mark.parametrize("checkpointing", [False, True])
def test_log_probs_loss_and_every_gradient_are_those_of_the_whole(checkpointing, tmp_path):
    settings = {"lora": False, "gradient_checkpointing": checkpointing, "num_generations": 2}
    trainer = tiny_trainer(tmp_path, **settings, **vision_settings(COUNTS))
    if checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = batch_of(trainer)
    expected = outcome(trainer, batch)
    for options in (
        {"mini_batch_size": 1},
        {"mini_batch_size": 3, "packing": "none"},
        {"max_tokens_per_microbatch": 60},
    ):
        metrics = {name: len(values) for name, values in trainer._metrics["train"].items()}
        with fastgrpo.patch(trainer, fastgrpo.Options(**options)):
            ours = outcome(trainer, batch)
        assert_same(ours, expected, options)
        for name, count in metrics.items():
            before, *added = trainer._metrics["train"][name][count - 1 :]
            assert not added or added == pytest.approx([before], rel=1e-5, abs=1e-6), (options, name)


@pytest.mark.parametrize(
    "settings", [{"bf16": True}, {"lora": LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear")}]
)
def test_a_part_s_second_forward_is_its_first(settings, tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, num_generations=2, **settings, **vision_settings(COUNTS))
    batch = batch_of(trainer)
    with fastgrpo.patch(trainer, fastgrpo.Options(mini_batch_size=3)):
        again = outcome(trainer, batch)
        monkeypatch.setattr("fastgrpo.trl.parts.checkpoint", lambda function, *given, use_reentrant: function(*given))
        kept = outcome(trainer, batch)
    assert all(torch.equal(again[name], kept[name]) for name in kept)


def test_one_part_is_alive_at_once(tmp_path):
    trainer = tiny_trainer(tmp_path, **vision_settings([3, 3, 3, 3]))
    batch = generated(trainer)
    tensors = [*batch.values(), *trainer.model.parameters()]
    there = {x.untyped_storage()._cdata for x in tensors if isinstance(x, Tensor)}

    def peak(**options) -> int:
        trainer.model.zero_grad()
        with fastgrpo.patch(trainer, fastgrpo.Options(**options)):
            gc.collect()
            with Alive() as alive:
                alive.seen.update(there)
                score_again(getattr(trainer, SCORING_METHOD), trainer.model, batch).sum().backward()
        return alive.peak

    whole = peak(share_prefix=False)
    shares = {size: peak(share_prefix=False, mini_batch_size=size) / whole for size in (1, 4)}
    assert shares[1] < 0.25 and shares[4] < 0.75, shares


def size_of_each(seen: list[dict[str, Any]], packing: str) -> list[int]:
    """Of each forward the tokens where rows have no padding, else the rows."""
    return [inputs["input_ids"].numel() if packing == "varlen" else len(inputs["input_ids"]) for inputs in seen]


def real_tokens(batch: dict[str, Any]) -> int:
    return int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())


@pytest.mark.skipif(
    not compat.has_fused_head(), reason="this TRL scores rows with images at full width, whatever is asked"
)
@pytest.mark.parametrize("packing", ["left", "varlen"])
def test_every_forward_keeps_within_the_tokens_and_one_part_runs_once(packing, tmp_path):
    trainer = tiny_trainer(tmp_path, num_generations=2, **vision_settings(COUNTS))
    batch = batch_of(trainer)
    seen = seen_by(trainer)
    options = fastgrpo.Options(packing=packing, share_prefix=False, max_tokens_per_microbatch=90)
    with fastgrpo.patch(trainer, options):
        seen.clear()
        outcome(trainer, batch)
    assert max(inputs["input_ids"].numel() for inputs in seen) <= 90
    # Two scorings of eight rows, and all but the last part of each once more.
    first = len(seen) // 3 + 1
    sizes, whole = size_of_each(seen, packing), {"left": 8, "varlen": real_tokens(batch)}[packing]
    assert first > 1
    assert sum(sizes[:first]) == whole and sum(sizes) == 3 * whole - sizes[first - 1], sizes


@pytest.mark.parametrize("rows_a_forward", [None, 3])
@pytest.mark.parametrize("packing", ["left", "varlen"] if compat.has_fused_head() else ["auto"])
def test_a_pass_without_gradient_keeps_its_own_batch_size_too(packing, rows_a_forward, tmp_path):
    trainer = tiny_trainer(tmp_path, num_generations=2, **vision_settings(COUNTS))
    batch = batch_of(trainer)

    def scored() -> Tensor:
        with torch.no_grad():
            score = lambda *given, **images: getattr(trainer, SCORING_METHOD)(  # noqa: E731
                *given, batch_size=rows_a_forward, **images
            )
            return score_again(score, trainer.model, batch) * batch["completion_mask"]

    expected = scored()
    seen = seen_by(trainer)
    with fastgrpo.patch(trainer, fastgrpo.Options(packing=packing, share_prefix=False, mini_batch_size=2)):
        seen.clear()
        assert (scored() - expected).abs().max() <= 1e-5
    sizes = size_of_each(seen, packing)
    # Eight rows in pairs, or the pairs of three, three and two rows.
    assert packing == "auto" or len(seen) == (4 if rows_a_forward is None else 2 + 2 + 1)
    if packing == "varlen":
        assert sum(sizes) == real_tokens(batch)
    else:
        assert sum(sizes) == 8 and max(sizes) == 2


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_other_families_give_the_same_in_parts(name, tmp_path):
    settings = vision_settings([1, 1, 1, 1]) | {"model": other_model(name), "lora": False}
    trainer = tiny_trainer(tmp_path, **settings)
    ids, mask, images = other_batch(name, [0, 1, 3, 1])

    def scored() -> dict[str, Tensor]:
        trainer.model.train()
        trainer.model.zero_grad(set_to_none=True)
        logprobs = getattr(trainer, SCORING_METHOD)(trainer.model, ids, mask, 6, **images)[0] * mask[:, -6:]
        (logprobs * torch.arange(1.0, 7.0).cos()).sum().backward()
        return {"log-probs": logprobs.detach()} | gradients_of(trainer.model)

    stock = scored()
    for options in ({"mini_batch_size": 1}, {"max_tokens_per_microbatch": 40}):
        with fastgrpo.patch(trainer, fastgrpo.Options(**options)):
            assert_same(scored(), stock, options)


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


# Four rows with 0, 1, 3 and 2 images, in tiles 0, 1, 5 and 2; each entry is known by its number.
IMAGES, TILES, WIDTH = [0, 1, 3, 2], [0, 1, 5, 2], 7
FAMILIES: dict[str, dict[str, Any]] = {
    "patches and grids (Qwen2.5-VL)": {
        "pixel_values": numbered(42, 2),
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 4], [1, 2, 2], [1, 2, 2], [1, 2, 3]]),
        "mm_token_type_ids": numbered(4, WIDTH),
    },
    "positions of patches (Gemma 4)": {
        "pixel_values": numbered(6, 5, 2),
        "image_position_ids": numbered(6, 5, 2),
        "mm_token_type_ids": numbered(4, WIDTH),
    },
    "tiles and shapes (LFM2-VL)": {
        "pixel_values": numbered(8, 5, 2),
        "pixel_attention_mask": numbered(8, 5),
        "spatial_shapes": numbered(8, 2),
        "num_tiles": TILES,
    },
    "tiles (InternVL)": {"pixel_values": numbered(8, 3, 2, 2), "num_tiles": TILES},
    "images (Gemma 3)": {"pixel_values": numbered(6, 3, 2, 2), "token_type_ids": numbered(4, WIDTH)},
    "images in tiles and sizes (LLaVA-NeXT)": {
        "pixel_values": numbered(6, 5, 3, 2, 2),
        "image_sizes": numbered(6, 2),
    },
    "padded rows (Idefics 3)": {
        "pixel_values": numbered(4, 3, 3, 2, 2),
        "pixel_attention_mask": numbered(4, 3, 2, 2),
    },
}


class Noted(torch.nn.Module):
    """Takes down what it is given, and scores every token as 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.given: list[dict[str, Any]] = []

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        self.given.append({"input_ids": input_ids} | inputs)
        zeros = self.weight * input_ids[:, 1:].float()
        logits = self.weight * torch.zeros(*input_ids.shape, 45)
        return SimpleNamespace(log_probs=zeros, entropy=zeros.detach(), aux_loss=None, logits=logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_gets_the_images_that_trl_gives_it(family, tmp_path):
    trainer = tiny_trainer(tmp_path)
    ids = torch.arange(4 * WIDTH).reshape(4, WIDTH)
    images = FAMILIES[family] | {"num_images": IMAGES}

    def given(**sizes: int) -> list[dict[str, Any]]:
        model = Noted()
        with torch.no_grad():
            getattr(trainer, SCORING_METHOD)(
                model, ids, torch.ones_like(ids), 4, compute_entropy=True, **sizes, **images
            )
        return sorted(model.given, key=lambda inputs: int(inputs["input_ids"][0, 0]))

    alone = given(batch_size=1)
    with fastgrpo.patch(trainer, fastgrpo.Options(mini_batch_size=1, packing="none")):
        ours = given()
    for one, two in zip(alone, ours, strict=True):
        for name, value in one.items():
            if not isinstance(value, Tensor):
                assert two[name] == value
            elif name in two:
                assert torch.equal(two[name], value), name
            else:  # a row without images
                assert one is alone[0] and (value.numel() == 0 or "padded" in family), name
        assert two.keys() <= one.keys()
    assert "pixel_values" not in ours[0] and "pixel_values" in ours[1]


def test_rows_come_in_any_order_with_images_of_their_own():
    by_row = ImagesByRow(FAMILIES["patches and grids (Qwen2.5-VL)"] | {"num_images": IMAGES, "image_sizes": None}, 4)
    taken = by_row.part(torch.tensor([3, 1])).arguments()
    assert taken["pixel_values"][:, 0].tolist() == [*range(64, 84, 2), *range(0, 8, 2)]
    assert taken["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 3], [1, 2, 2]]
    assert taken["num_images"] == [2, 1] and taken["mm_token_type_ids"][:, 0].tolist() == [21, 7]
    assert by_row.part(torch.tensor([0])).arguments().keys() == {"mm_token_type_ids"}


def test_padded_rows_are_known_for_such_where_there_are_as_many_images():
    by_row = ImagesByRow(FAMILIES["padded rows (Idefics 3)"] | {"num_images": [0, 1, 3, 0]}, 4)
    assert torch.equal(by_row.part(torch.tensor([1])).arguments()["pixel_values"], numbered(4, 3, 3, 2, 2)[1:2])


@pytest.mark.parametrize(
    ("images", "what"),
    [
        ({"pixel_values": numbered(5, 3, 2, 2), "num_images": IMAGES}, "pixel_values of size [5, 3, 2, 2]"),
        (
            {"pixel_values": numbered(6, 3, 2, 2), "pixel_attention_mask": numbered(6, 2, 2), "num_images": IMAGES},
            "pixel_attention_mask of size [6, 2, 2]",
        ),
        (
            {"pixel_values": numbered(4, 3, 2, 2), "image_sizes": numbered(4, 2), "num_images": IMAGES},
            "image_sizes of size [4, 2]",
        ),
        (
            {"pixel_values": numbered(4, 3, 3, 2, 2), "num_images": [0, 1, 3, 0]},
            "pixel_values of size [4, 3, 3, 2, 2]",
        ),
        ({"token_type_ids": numbered(8, 7)}, "token_type_ids of size [8, 7]"),
    ],
    ids=["neither rows nor images", "masks by image", "sizes by row", "rows or images", "other rows"],
)
def test_what_belongs_to_no_row_for_certain_is_refused_by_name_before_any_forward(images, what, tmp_path):
    trainer = tiny_trainer(tmp_path)
    ids, model = torch.ones(4, 7, dtype=torch.int64), Noted()
    for options in ({"mini_batch_size": 1}, {"max_tokens_per_microbatch": 9}):
        with (
            fastgrpo.patch(trainer, fastgrpo.Options(**options)),
            pytest.raises(
                ValueError, match=rf"{re.escape(what)} cannot be taken apart into 4 rows.*mini_batch_size.*None"
            ),
        ):
            getattr(trainer, SCORING_METHOD)(model, ids, ids, 4, **images)
    assert not model.given


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_part_of_a_part_has_the_images_of_its_rows(asked_before):
    """And what is between was never copied, unless it was asked for."""
    inputs = {"pixel_values": torch.arange(4.0).view(4, 1, 1, 1), "token_type_ids": torch.arange(8).view(4, 2)}
    between = ImagesByRow(inputs, 4).part(torch.tensor([3, 1, 0]))
    if asked_before:
        assert between.arguments()["pixel_values"].flatten().tolist() == [3, 1, 0]
    found = between.part(torch.tensor([2, 0])).arguments()
    assert found["pixel_values"].flatten().tolist() == [0, 3]
    assert found["token_type_ids"].tolist() == [[0, 1], [6, 7]]
    assert ("_apart" in vars(between)) is asked_before
