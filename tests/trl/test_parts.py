"""`mini_batch_size` and `max_tokens_per_microbatch`: less alive at once, the same losses and parameters."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from test_scoring import batch
from tiny import tiny_trainer
from trl import GRPOTrainer
from twins import twins

import fastgrpo.trl.compat
from fastgrpo.packing import left_pack, pack
from fastgrpo.trl.parts import Limits

TWINS = {
    "one sequence": ({"mini_batch_size": 1}, {"num_iterations": 2, "beta": 0.04}),
    "sequences, checkpointing": ({"mini_batch_size": 3}, {"gradient_checkpointing": True, "beta": 0.04}),
    "sequences, full": ({"mini_batch_size": 2}, {"lora": False, "entropy_coef": 0.05, "loss_type": "grpo"}),
    "tokens": ({"max_tokens_per_microbatch": 40}, {"loss_type": "bnpo", "top_entropy_quantile": 0.5}),
    "tokens, left, full, checkpointing": (
        {"max_tokens_per_microbatch": 40, "packing": "left"},
        {"lora": False, "gradient_checkpointing": True, "importance_sampling_level": "sequence"},
    ),
    "every row exceeds the limit": ({"max_tokens_per_microbatch": 1, "packing": "none"}, {"loss_type": "luspo"}),
    "both, rows left out": (
        {"mini_batch_size": 2, "max_tokens_per_microbatch": 30},
        {"mask_truncated_completions": True},
    ),
}


@pytest.mark.parametrize("case", TWINS)
def test_in_parts_it_trains_as_stock_does(case, tmp_path):
    options, settings = TWINS[case]
    twins(tmp_path, options=options, max_steps=2, **settings)


PROMPTS, COMPLETIONS, GROUPS = [30, 20] * 4, [90, 20, 80, 90, 70, 90, 0, 60], [0, 1] * 4


def scores(trainer: GRPOTrainer) -> torch.Tensor:
    """Log-probs of eight rows, as the loss counts them: 0 where a row has no token."""
    ids, mask, width = batch(PROMPTS, COMPLETIONS, GROUPS)
    ids, mask = ids.to(trainer.accelerator.device), mask.to(trainer.accelerator.device)
    found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width, compute_entropy=True)[0]
    return found * mask[:, -width:]


def gradients(trainer: GRPOTrainer) -> list[torch.Tensor]:
    """After a backward pass of `scores`, with the random numbers of seed 0."""
    torch.manual_seed(0)
    trainer.model.zero_grad()
    scores(trainer).square().sum().backward()
    return [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]


class Alive(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of the tensors made while this is on: those alive now, and the most that ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_part_is_alive_at_once(checkpointing, tmp_path):
    trainer = tiny_trainer(tmp_path, gradient_checkpointing=checkpointing)
    if checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer.model.train()

    def peak(**options) -> int:
        trainer.model.zero_grad()
        with fastgrpo.patch(trainer, fastgrpo.Options(share_prefix=False, **options)):
            gc.collect()
            with Alive() as alive:
                scores(trainer).sum().backward()
        return alive.peak

    # The longest row has 17 % of the tokens.
    whole = peak()
    shares = {size: peak(mini_batch_size=size) / whole for size in (1, 4)}
    assert shares[1] < 0.35 and shares[4] < 0.75, shares


@pytest.mark.parametrize("options", [{"mini_batch_size": 3}, {"max_tokens_per_microbatch": 250}])
@pytest.mark.parametrize(
    "settings", [{"bf16": True}, {"lora": LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear")}]
)
def test_a_part_s_second_forward_is_its_first(options, settings, tmp_path, monkeypatch):
    """Under autocast and with dropout: the gradients are bit for bit those of parts that are all kept."""
    trainer = tiny_trainer(tmp_path, **settings)
    trainer.model.train()
    with fastgrpo.patch(trainer, fastgrpo.Options(**options)):
        again = gradients(trainer)
        monkeypatch.setattr("fastgrpo.trl.parts.checkpoint", lambda function, *given, use_reentrant: function(*given))
        kept = gradients(trainer)
    assert all(torch.equal(first, second) for first, second in zip(again, kept, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_with_dropout_only_whole_micro_batches_as_trl_pads_them_get_stocks_masks(dropout, tmp_path):
    trainer = tiny_trainer(tmp_path, lora=LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear"))
    trainer.model.train()
    stock = gradients(trainer)

    def is_stocks(**options) -> bool:
        with fastgrpo.patch(trainer, fastgrpo.Options(packing="none", **options)):
            return all(
                torch.allclose(one, two, rtol=1e-4, atol=1e-4 * float(two.abs().max()))
                for one, two in zip(gradients(trainer), stock, strict=True)
            )

    assert is_stocks()
    assert is_stocks(mini_batch_size=3) is is_stocks(max_tokens_per_microbatch=250) is (dropout == 0)


def forwards(trainer: GRPOTrainer) -> list[tuple[bool, bool, int]]:
    """(whether it is the policy's, with a gradient, tokens) of every forward but generation's, filled as training goes."""
    seen = []

    def note(module, args, kwargs):
        if kwargs.get("fused_lm_head"):
            seen.append((module is trainer.model, torch.is_grad_enabled(), kwargs["input_ids"].numel()))

    for model in filter(None, (trainer.model, trainer.ref_model)):
        model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.mark.skipif(
    not fastgrpo.trl.compat.has_fused_head(), reason="forwards are counted by the fused head's argument"
)
def test_every_forward_keeps_within_the_tokens_and_one_part_runs_once(tmp_path):
    trainer = tiny_trainer(tmp_path, model="llama", max_steps=2, num_iterations=2, beta=0.04)
    seen = forwards(trainer)
    with fastgrpo.patch(trainer, fastgrpo.Options(max_tokens_per_microbatch=45)):
        trainer.train()
    assert {grad for _, grad, _ in seen} == {False, True}
    assert all(tokens <= 45 for *_, tokens in seen)

    trainer.model.train()
    for size, expected in ((1, 8 + 7), (3, 3 + 2), (8, 1)):
        with fastgrpo.patch(trainer, fastgrpo.Options(mini_batch_size=size)):
            seen.clear()
            gradients(trainer)
        assert len(seen) == expected, size


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=9),
    st.sampled_from(["varlen", "left", "none"]),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 40)),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_parts_have_every_row_once_and_keep_the_limits(rows, layout, share, tokens, sequences):
    groups = [group for group, _ in rows]
    named = [groups.index(group) for group in groups]
    ids, mask, width = batch([3 + group for group in groups], [completion for _, completion in rows], named)
    scored = torch.zeros_like(mask, dtype=torch.bool)
    scored[:, -width:] = True
    parts = Limits(sequences, tokens).split(ids, mask, scored, layout, share)

    def computed(part: torch.Tensor) -> int:
        if layout == "none":
            return ids[part].numel()
        if layout == "left":
            return left_pack(ids[part], mask[part]).input_ids.numel()
        prompts = (mask[part].bool() & ~scored[part]).sum(1)
        return pack(ids[part], mask[part], prompts, share).tokens.numel()

    assert sorted(torch.cat(parts).tolist()) == list(range(len(rows)))
    for part in parts:
        assert part.tolist() == sorted(part.tolist())
        assert sequences is None or len(part) <= sequences
        assert tokens is None or len(part) == 1 or computed(part) <= tokens
    assert [computed(part) for part in parts] == sorted(computed(part) for part in parts)
    everything = torch.arange(len(rows))
    if (sequences or 9) >= len(rows) and (tokens or 10**6) >= computed(everything):
        assert len(parts) == 1


def test_a_group_stays_together_where_it_fits():
    ids, mask, width = batch([5] * 8, [4] * 8, [0, 1, 0, 1, 0, 1, 0, 1])
    scored = torch.zeros_like(mask, dtype=torch.bool)
    scored[:, -width:] = True

    def split(sequences=None, tokens=None):
        return sorted(part.tolist() for part in Limits(sequences, tokens).split(ids, mask, scored, "varlen", True))

    assert split(sequences=4) == split(tokens=21) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert split(sequences=2) == split(tokens=13) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert split(tokens=20) == [[0, 2, 4], [1, 6], [3, 5, 7]]
    assert split(tokens=42) == [list(range(8))]


def test_rows_that_keep_trl_s_padding_are_counted_with_it(tmp_path):
    trainer = tiny_trainer(tmp_path)
    ids, mask, width = batch([4] * 4, [6] * 4, [0, 1, 2, 3])
    mask[0, :4] = 0  # an empty prompt
    widths = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    with fastgrpo.patch(trainer, fastgrpo.Options(max_tokens_per_microbatch=20)), torch.no_grad():
        widths.clear()
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)
    assert len(widths) == 2 and max(widths) <= 20


class OwnScores(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": "qwen3 moe", "router_aux_loss_coef": 0.1}, "the auxiliary loss is no sum over rows"),
        ({"trainer_class": OwnScores}, "OwnScores brings its own _get_per_token_logps_and_entropies"),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "gradient_checkpointing_kwargs={'use_reentrant': True} does not nest",
        ),
    ],
)
def test_where_a_micro_batch_cannot_be_taken_apart_it_is_refused(settings, reason, tmp_path):
    trainer = tiny_trainer(tmp_path, **settings)
    before = dict(trainer.__dict__)
    for options in ({"mini_batch_size": 2}, {"max_tokens_per_microbatch": 9}):
        (name,) = options
        with pytest.raises(ValueError, match=rf"{name}={options[name]} is not possible: {re.escape(reason)}"):
            fastgrpo.patch(trainer, fastgrpo.Options(**options))
    assert trainer.__dict__ == before


def test_a_mini_batch_is_no_larger_than_the_generation_batch(tmp_path):
    trainer = tiny_trainer(tmp_path)
    fastgrpo.patch(trainer, fastgrpo.Options(mini_batch_size=8)).unpatch()
    with pytest.raises(ValueError, match=r"mini_batch_size is 9, more than the 8 sequences.*give at most that"):
        fastgrpo.patch(trainer, fastgrpo.Options(mini_batch_size=9))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
@pytest.mark.parametrize("name", ["mini_batch_size", "max_tokens_per_microbatch"])
def test_limits_are_whole_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; give a whole number from 1 on, or None"):
        fastgrpo.Options(**{name: value})
