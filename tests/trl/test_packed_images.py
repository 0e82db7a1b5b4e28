"""Rows with images without padding: a prompt and its pictures once, and everything else as stock TRL has it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from outcomes import assert_same, generated, outcome, seen_by
from tiny import VISION_IDS, tiny_trainer
from tiny_images import vision_settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from twins import assert_twins, trained_parameters, twins

import fastgrpo
import fastgrpo.trl.compat as compat
from fastgrpo.trl.images import PackedImages

pytestmark = pytest.mark.skipif(not compat.has_fused_head(), reason="this TRL takes full logits where there are images")

FAMILIES = ["qwen2 vl", "qwen2.5 vl", "qwen3 vl", "qwen3 vl moe"]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_loss_and_every_gradient_are_stock_s(family, checkpointing, share, tmp_path):
    settings = {"lora": False, "gradient_checkpointing": checkpointing, "num_generations": 4}
    trainer = tiny_trainer(tmp_path, **settings, **vision_settings([1, 3, 1, 2], family))
    if checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = generated(trainer)
    expected = outcome(trainer, batch)
    assert any("visual" in name and float(value.abs().max()) > 0 for name, value in expected.items())
    seen = seen_by(trainer)
    with fastgrpo.patch(trainer, fastgrpo.Options(share_prefix=share)) as handle:
        assert handle.layout == "varlen", handle.not_varlen_because
        seen.clear()
        ours = outcome(trainer, batch)
    assert_same(ours, expected)
    pictures, prompts = sum(batch["num_images"]), int(batch["prompt_mask"].sum())
    for inputs in seen:
        assert inputs["input_ids"].shape[0] == 1 and inputs.get("attention_mask") is None
        # Two prompts of four rows each; a router counts the tokens of every row.
        times = 4 if share and not inputs.get("output_router_logits") else 1
        assert inputs["image_grid_thw"].shape[0] * times == pictures
        assert inputs["input_ids"].shape[1] == prompts // times + int(batch["completion_mask"].sum())


def test_the_same_words_with_another_picture_are_another_prompt(tmp_path):
    trainer = tiny_trainer(tmp_path, lora=False, num_generations=4, **vision_settings([1, 1, 1, 1]))
    batch = generated(trainer)
    # Words and the number of image tokens of the first prompt, the pictures stay.
    first = batch["image_grid_thw"][0]
    pixels = batch["pixel_values"].split(batch["image_grid_thw"].prod(1).tolist())
    pieces = [pixels[0], pixels[0], pixels[0] + 1, pixels[0]] + [pixels[0] * 0.5] * 4
    batch["pixel_values"] = torch.cat(pieces)
    batch["image_grid_thw"] = first.expand(8, 3).clone()
    for name in ("prompt_ids", "prompt_mask", "mm_token_type_ids"):
        if name in batch:
            batch[name] = batch[name][:1].expand(8, -1).clone()
    expected = outcome(trainer, batch)
    seen = seen_by(trainer)
    with fastgrpo.patch(trainer):
        seen.clear()
        ours = outcome(trainer, batch)
    assert_same(ours, expected)
    assert [len(inputs["image_grid_thw"]) for inputs in seen] == [3, 3]


@pytest.mark.parametrize("options", [{}, {"mini_batch_size": 4}])
def test_completions_with_the_same_picture_do_not_share_it(options, tmp_path):
    trainer = tiny_trainer(tmp_path, lora=False, num_generations=4, **vision_settings([1, 1, 1, 1]))
    batch = generated(trainer)
    # A tool answers every row with one picture of one token, as TRL lays that out.
    grids, place = batch["image_grid_thw"], batch["prompt_ids"].shape[1] + 1
    pixels = batch["pixel_values"].split(grids.prod(1).tolist())
    shown = next(image for image, grid in enumerate(grids) if grid.prod() == 4)
    batch["pixel_values"] = torch.cat([image for own in pixels for image in (own, pixels[shown])])
    batch["image_grid_thw"] = torch.stack([grid for own in grids for grid in (own, grids[shown])])
    batch["num_images"] = [2] * len(grids)
    batch["completion_ids"][:, 1] = VISION_IDS["<|image_pad|>"]
    batch["completion_mask"][:, :3] = batch["mm_token_type_ids"][:, place] = 1
    batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
    batch["tool_mask"][:, 1] = 0
    expected = outcome(trainer, batch)
    with fastgrpo.patch(trainer, fastgrpo.Options(**options)):
        ours = outcome(trainer, batch)
    assert_same(ours, expected)


def test_pictures_are_compared_bit_by_bit_and_seldom(monkeypatch):
    asked = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: (asked.append(len(a)), equal(a, b))[1])
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        asked.clear()
        pixels = (torch.arange(40 * 4 * 6).reshape(40, 4, 6) % 251).to(dtype).repeat(2, 1, 1)
        pixels[79] = pixels[79].flip(0)  # the same numbers in another order
        inputs = {
            "pixel_values": pixels.flatten(0, 1),
            "image_grid_thw": torch.tensor([[1, 2, 2]]).expand(80, 3),
            "num_images": [1] * 80,
            "mm_token_type_ids": torch.tensor([[1, 0, 0]]).repeat(80, 1),
        }
        inputs["mm_token_type_ids"][41, 2] = 1  # in its completion
        names = PackedImages.of(inputs, 80).names(2)
        assert names == [*range(40), 0, 41, *range(2, 39), 79]
        assert len(asked) < 120


@pytest.mark.parametrize("counts", [[0, 1, 3, 1], [0, 0, 0, 1]])
def test_rows_without_an_image_stand_beside_rows_with_some(counts, tmp_path):
    trainer = tiny_trainer(tmp_path, lora=False, num_generations=2, **vision_settings(counts))
    batch = generated(trainer)
    expected = outcome(trainer, batch)
    with fastgrpo.patch(trainer):
        assert_same(outcome(trainer, batch), expected)


@pytest.mark.parametrize("options", [{"mini_batch_size": 3}, {"max_tokens_per_microbatch": 60}])
def test_in_parts_every_prompt_has_its_pictures(options, tmp_path):
    trainer = tiny_trainer(tmp_path, lora=False, num_generations=4, **vision_settings([1, 3, 1, 2]))
    batch = generated(trainer)
    expected = outcome(trainer, batch)
    seen = seen_by(trainer)
    with fastgrpo.patch(trainer, fastgrpo.Options(**options)):
        seen.clear()
        assert_same(outcome(trainer, batch), expected)
    assert len(seen) > 3
    if "max_tokens_per_microbatch" in options:
        assert max(inputs["input_ids"].shape[1] for inputs in seen) <= 60


def test_rows_without_an_advantage_stay_out_with_their_pictures(tmp_path):
    trainer = tiny_trainer(tmp_path, lora=False, num_generations=4, **vision_settings([1, 3, 1, 2]))
    batch = generated(trainer)
    batch["advantages"][:4] = 0
    expected = outcome(trainer, batch)
    seen = seen_by(trainer)
    with fastgrpo.patch(trainer, fastgrpo.Options(skip_zero_advantage=True)):
        seen.clear()
        ours = outcome(trainer, batch)
    assert_same(ours, expected)
    scored, loss = seen
    assert len(scored["image_grid_thw"]) == sum(batch["num_images"][::4])
    assert len(loss["image_grid_thw"]) == batch["num_images"][4]


@pytest.mark.parametrize(
    "config",
    [
        {"beta": 0.04, "num_iterations": 2},
        {"lora": False, "gradient_checkpointing": True},
        {"lora": False, "loss_type": "grpo", "importance_sampling_level": "sequence"},
        {},
    ],
    ids=["reference, two iterations", "full, checkpointing", "full, sequences", "adapters"],
)
def test_it_trains_as_stock_does(config, tmp_path):
    _, patched = twins(tmp_path, max_steps=2, num_generations=4, **config, **vision_settings([1, 3, 1, 2]))
    assert fastgrpo.patch(patched).layout == "varlen"


def test_groups_come_together_with_their_pictures(tmp_path):
    config = {
        "max_steps": 3,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 2,
    }
    trainers, before, pictures = [], None, []
    for patched in (False, True):
        trainer = tiny_trainer(tmp_path, **config, **vision_settings([1, 3, 1, 2]))
        before = trained_parameters(trainer)
        if patched:
            assert fastgrpo.patch(trainer).in_place_because == ""
        seen = seen_by(trainer)
        trainer.train()
        pictures.append(sum(len(x["image_grid_thw"]) for x in seen if x.get("labels") is not None))
        trainers.append(trainer)
    assert_twins(*trainers, before)
    stock, ours = pictures
    assert ours * 4 == stock
    # What stays until the next step has no copy of the pictures in another order.
    exchange = trainers[1]._compute_loss.order._exchange
    assert exchange.made and not any("pixel_values" in batch for batch in exchange.made)


def test_backends_say_that_a_trained_head_has_its_loss_in_one_pass(tmp_path):
    trainer = tiny_trainer(tmp_path, lora=False, **vision_settings([1, 3, 1, 2]))
    with fastgrpo.patch(trainer):
        backends = fastgrpo.backends()
    assert backends["trainer loss"].reason == "" and backends["packing"].reason == ""


def test_what_the_model_keeps_of_positions_is_where_its_rows_are():
    class Backbone(torch.nn.Module):
        def compute_3d_position_ids(self, input_ids: Tensor) -> Tensor:
            self.rope_deltas = torch.zeros(len(input_ids), 1, device=input_ids.device)
            return input_ids.expand(3, -1, -1)

    model = SimpleNamespace(base_model_prefix="model", model=Backbone())
    with FakeTensorMode():
        ids = torch.zeros(2, 4, dtype=torch.int64, device="cuda")
        images = object.__new__(PackedImages)
        images._apart = {"image_grid_thw": [torch.ones(1, 3, dtype=torch.int64)] * 2, "num_images": [1, 1]}
        assert images.positions(model, ids, torch.ones_like(ids)).device.type == "cpu"
        assert model.model.rope_deltas.device.type == "cuda"
