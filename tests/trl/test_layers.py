"""Layers that run as one function while a trainer scores: which, when, and that nothing else changes."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from tiny import tiny_model, tiny_trainer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama

import fastgrpo
from fastgrpo import Options
from fastgrpo.trl import layers, lora_layers, mlp_layers

RUN = Options(run_log=False)
PLAIN = Options(run_log=False, fused_layers=False)
LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": "gaussian"}


@pytest.fixture
def ran(monkeypatch) -> Counter:
    """How often each fused function ran: LoRA layers, and how many of them together with others; norms; rotations."""
    counts: Counter = Counter()

    def counted(module, name, note):
        function = getattr(module, name)

        def call(*args):
            note(*args)
            return function(*args)

        monkeypatch.setattr(module, name, call)

    def linears(x, shared, trained):
        counts["lora_linear"] += len(shared.layers)
        counts["together"] += len(shared.layers) if len(shared.layers) > 1 else 0

    def one(name):
        return lambda *_: counts.update([name])

    counted(lora_layers, "lora_linears", linears)
    counted(lora_layers, "lora_linear", one("lora_linear"))
    counted(mlp_layers, "gated_mlp", one("gated_mlp"))
    counted(layers, "rotary", one("rotary"))
    counted(torch, "_fused_rms_norm", one("norm"))
    return counts


def trained(tmp_path, model="llama", lora=None, **config):
    """A trainer whose adapters have left their start, where B is 0."""
    trainer = tiny_trainer(tmp_path, model=model, lora=LoraConfig(**(LORA | (lora or {}))), **config)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    return trainer


def scored(trainer, grad=True):
    ids = torch.randint(3, 45, (4, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[2, -2:] = mask[3, -3:] = 0
    trainer.model.zero_grad()
    trainer.model.train()
    with torch.set_grad_enabled(grad):
        logprobs = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 5)[0] * mask[:, -5:]
    if not grad:
        return [logprobs]
    (logprobs * torch.arange(5.0)).sum().backward()
    return [logprobs.detach(), *(p.grad.clone() for p in trainer.model.parameters() if p.grad is not None)]


def compare(found, expected, tolerance=1e-5):
    assert len(found) == len(expected) > 1
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm() + 1e-7, f"{(a - b).norm() / b.norm():.1e}"


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize("model", ["llama", "qwen2 tied", "qwen3", "gemma2 softcap", "mistral window"])
def test_scores_and_gradients_stay_and_every_layer_is_fused(model, checkpointing, tmp_path, ran):
    config = {"gradient_checkpointing": checkpointing is not None, "gradient_checkpointing_kwargs": checkpointing}
    trainer = trained(tmp_path, model, **config)
    with fastgrpo.patch(trainer, PLAIN):
        assert not ran
        expected = scored(trainer)
    with fastgrpo.patch(trainer, RUN):
        ran.clear()
        found = scored(trainer)
    compare(found, expected)
    passes = 1 if checkpointing is None else 2
    # The last norm is not checkpointed; a second forward may stop once it has what is needed.
    norms = 0 if model == "gemma2 softcap" else (8 if model == "qwen3" else 4) * passes + 1
    assert ran["gated_mlp"] == (0 if model == "gemma2 softcap" else 2 * passes)
    assert ran["lora_linear"] + 3 * ran["gated_mlp"] in (14 * passes, 14 * passes - 2)
    assert ran["together"] == 6 * passes
    assert ran["norm"] == norms
    assert ran["rotary"] == 2 * passes


def test_full_fine_tuning_under_autocast_keeps_its_results_up_to_rounding(tmp_path, ran):
    trainer = tiny_trainer(tmp_path, model="qwen3", lora=False, bf16=True)
    with fastgrpo.patch(trainer, PLAIN):
        expected = scored(trainer)
    with fastgrpo.patch(trainer, RUN):
        ran.clear()
        compare(scored(trainer), expected, 0.05)
    assert ran["norm"] == 9
    assert not ran["lora_linear"]


def a_hook(trainer):
    first_layer(trainer).lora_A.default.register_forward_hook(lambda *_: None)


def own_forward(trainer):
    base = first_layer(trainer).base_layer
    base.forward = type(base).forward.__get__(base)


def second_adapter(trainer):
    trainer.model.add_adapter("second", LoraConfig(**LORA))
    trainer.model.base_model.set_adapter(["default", "second"])


def merged(trainer):
    trainer.model.merge_adapter()


def trained_base(trainer):
    for name, parameter in trainer.model.named_parameters():
        if "base_layer" in name:
            parameter.requires_grad_()


def another_dtype(trainer):
    for name, module in trainer.model.named_modules():
        if name.endswith(("lora_A", "lora_B")):
            module.double()


def first_layer(trainer):
    return next(module for module in trainer.model.modules() if isinstance(module, Linear))


@pytest.mark.parametrize(
    ("lora", "change", "fused"),
    [
        ({"lora_dropout": 0.1}, None, 0),
        ({"use_dora": True}, None, 0),
        ({"lora_bias": True, "init_lora_weights": True}, None, 0),
        ({}, a_hook, 13),
        ({}, own_forward, 13),
        ({}, second_adapter, 0),
        ({}, merged, 0),
        ({}, trained_base, 0),
        ({}, another_dtype, 0),
        ({"use_rslora": True}, None, 14),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.filterwarnings("ignore")
def test_adapters_that_are_more_than_two_plain_matrices_run_their_own_forward(lora, change, fused, tmp_path, ran):
    trainer = trained(tmp_path, "qwen2 tied", lora)
    if change is not None:
        change(trainer)
    outcomes = []
    for options in (PLAIN, RUN):
        with fastgrpo.patch(trainer, options):
            ran.clear()
            torch.manual_seed(0)
            outcomes.append(scored(trainer, grad=change is not merged))
    assert ran["lora_linear"] + 3 * ran["gated_mlp"] == fused
    compare([*outcomes[1], torch.ones(1)], [*outcomes[0], torch.ones(1)])


def test_disabled_adapters_are_not_added(tmp_path, ran):
    trainer = trained(tmp_path)
    with fastgrpo.patch(trainer, RUN):
        with trainer.model.disable_adapter():
            ran.clear()
            without = scored(trainer, grad=False)[0]
            assert not ran["lora_linear"]
        assert not torch.allclose(scored(trainer, grad=False)[0], without)
        trainer.model.set_adapter("default")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_reference_pass_between_a_forward_and_its_backward(reentrant, tmp_path, ran):
    config = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    trainer = trained(tmp_path, **config)
    ids = torch.randint(3, 45, (2, 7))

    def gradients(with_reference):
        trainer.model.zero_grad()
        trainer.model.train()
        score = trainer._get_per_token_logps_and_entropies
        loss = score(trainer.model, ids, torch.ones_like(ids), 4)[0].sum()
        if with_reference:
            with torch.no_grad(), trainer.model.disable_adapter():
                score(trainer.model, ids, torch.ones_like(ids), 4)
            trainer.model.set_adapter("default")
        loss.backward()
        return [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]

    with fastgrpo.patch(trainer, RUN):
        ran.clear()
        compare(gradients(True), gradients(False), 1e-6)
    assert ran["lora_linear"] + 3 * ran["gated_mlp"] >= 48


def test_nothing_but_scoring_is_fused(tmp_path, ran):
    """Generation, a forward of the user's own with its second forward, and another trainer's."""
    trainer = trained(tmp_path / "a", gradient_checkpointing=True)
    other = trained(tmp_path / "b", gradient_checkpointing=True)
    with fastgrpo.patch(trainer, RUN):
        scored(trainer)
        ran.clear()
        ids = torch.randint(3, 45, (2, 6))
        trainer.model.train()
        trainer.model(input_ids=ids).logits.sum().backward()
        scored(other)
        trainer.model.eval()
        trainer.model.generate(input_ids=ids, max_new_tokens=2, do_sample=False)
        assert not ran


def test_copies_of_adapters_follow_them(tmp_path):
    """However a step, a checkpoint or a merge writes them: `.data` leaves no trace that could be looked for."""
    trainer = trained(tmp_path, bf16=True)
    for name, parameter in trainer.model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.float()
    with fastgrpo.patch(trainer, RUN):
        before = scored(trainer)[0]
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data.mul_(1.5)
        after = scored(trainer)[0]
    with fastgrpo.patch(trainer, PLAIN):
        expected = scored(trainer)[0]
    assert (after - expected).norm() < 0.2 * (before - expected).norm()


def test_two_forwards_before_their_backwards(tmp_path):
    trainer = trained(tmp_path, bf16=True, gradient_checkpointing=True)
    for name, parameter in trainer.model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.float()
    ids = torch.randint(3, 45, (4, 7))

    def gradients(together):
        trainer.model.train()
        trainer.model.zero_grad()
        losses = []
        for rows in ids.split(2):
            logprobs = trainer._get_per_token_logps_and_entropies(trainer.model, rows, torch.ones_like(rows), 4)[0]
            losses.append(logprobs.sum())
            if not together:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        return [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]

    with fastgrpo.patch(trainer, RUN):
        gradients(False)
        compare(gradients(True), gradients(False), 1e-6)


def test_unpatching_restores_classes_and_functions_and_leaves_no_trace_on_the_model(tmp_path):
    forwards = Linear.forward, modeling_llama.LlamaRMSNorm.forward, modeling_llama.apply_rotary_pos_emb
    trainer = trained(tmp_path / "a")
    second = trained(tmp_path / "b")
    untouched = [dict(vars(module)) for module in trainer.model.modules()]
    handles = [fastgrpo.patch(trainer, RUN), fastgrpo.patch(second, RUN)]
    scored(trainer)
    scored(second)
    assert [dict(vars(module)) for module in trainer.model.modules()] == untouched
    pickle.dumps(trainer.model.state_dict())
    copy.deepcopy(trainer.model)
    for handle in handles:
        assert Linear.forward is not forwards[0]
        handle.unpatch()
    assert (Linear.forward, modeling_llama.LlamaRMSNorm.forward, modeling_llama.apply_rotary_pos_emb) == forwards


def test_another_norm_or_rotation_is_left_alone(monkeypatch, tmp_path, ran):
    class Shifted(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + 0.1

    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Shifted)
    original = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *a, **k: original(*a, **k))
    trainer = trained(tmp_path)
    with fastgrpo.patch(trainer, PLAIN):
        expected = scored(trainer)
    with fastgrpo.patch(trainer, RUN):
        ran.clear()
        compare(scored(trainer), expected)
    assert not ran["norm"]
    assert not ran["rotary"]


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count[function.name().split("::")[1].split(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def test_lora_layers_are_products_and_no_cast(tmp_path):
    """Counted as the difference that a layer makes, so that embeddings, head and layout drop out."""
    counts = []
    for depth in (1, 2):
        model = tiny_model("llama").to(torch.bfloat16)
        model.model.layers = model.model.layers[:depth]
        trainer = trained(tmp_path / str(depth), model, bf16=True)
        for name, parameter in trainer.model.named_parameters():
            if "lora" in name:
                parameter.data = parameter.data.float()
        with fastgrpo.patch(trainer, RUN):
            scored(trainer, grad=False)
            with _Ops() as ops:
                scored(trainer, grad=False)
        counts.append(ops.count)
    layer = counts[1] - counts[0]
    # W and B of seven layers, and one A for those of queries, keys and values.
    assert layer["mm"] + layer["addmm"] + layer["addmm_"] == 7 + 7 + 5
    assert layer["cat"] == layer["neg"] == 0
    # Of the norms and the gate, which are one op on CUDA only, and of the attention, which is flash's there.
    assert layer["_to_copy"] == 10


def test_layers_that_would_change_results_are_found_when_patching(tmp_path, ran, monkeypatch, caplog):
    monkeypatch.setattr(layers, "rotary", lambda query, key, cos, sin: (query, key))
    trainer = trained(tmp_path)
    with fastgrpo.patch(trainer, PLAIN):
        expected = scored(trainer)
    with fastgrpo.patch(trainer, RUN) as handle:
        ran.clear()
        compare(scored(trainer), expected)
        assert handle.layout == "varlen"
    assert not ran
    assert "layers run their own forward, as with fused_layers=False: log-probs differ" in caplog.text
