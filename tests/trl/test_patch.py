"""Claims about `patch` and `unpatch`: nothing but the named attributes changes, and it can always be taken back."""

from __future__ import annotations

import functools
import gc
import pickle
import re
import types

import pytest
import torch
import trl.trainer.utils as trl_utils
from peft import LoraConfig, PromptTuningConfig, inject_adapter_in_model
from tiny import tiny_model, tiny_trainer
from trl import GRPOTrainer

import fastgrpo
import fastgrpo.trl.compat as compat
import fastgrpo.trl.heads as heads

SCORING = "_get_per_token_logps_and_entropies"
TRL_HEAD = trl_utils._ChunkedLogProbFunction


@pytest.fixture
def trainer(tmp_path):
    return tiny_trainer(tmp_path, max_steps=1)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    yield
    assert trl_utils._ChunkedLogProbFunction is TRL_HEAD, "a test left TRL's head replaced"


def score(trainer, **options):
    ids = torch.tensor([[0, 0, 5, 6, 7, 8], [3, 4, 5, 6, 7, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 3, **options)


WATCHED = {"_generate", "_calculate_rewards", "_generate_and_score_completions", "_prepare_inputs"}


def test_patch_replaces_what_its_table_says_and_unpatch_restores_the_trainer_exactly(trainer):
    before = dict(trainer.__dict__)
    handle = fastgrpo.patch(trainer)
    replaced = {name for name in trainer.__dict__ if trainer.__dict__[name] is not before.get(name)}
    assert replaced == {SCORING, "_compute_loss", "train", *WATCHED} == {name for _, name, *_ in handle.replaced}
    assert handle.active and (trl_utils._ChunkedLogProbFunction is not TRL_HEAD) == compat.has_fused_head()
    fastgrpo.unpatch(trainer)
    assert trainer.__dict__ == before
    assert not handle.active and trl_utils._ChunkedLogProbFunction is TRL_HEAD


def test_patching_twice_gives_the_same_handle_and_one_unpatch_is_enough(trainer):
    handle = fastgrpo.patch(trainer)
    assert fastgrpo.patch(trainer) is handle
    assert fastgrpo.patch(trainer, fastgrpo.Options()) is handle
    with pytest.raises(ValueError, match=r"call fastgrpo\.unpatch"):
        fastgrpo.patch(trainer, fastgrpo.Options(num_chunks=3))
    assert handle.active
    handle.unpatch()
    handle.unpatch()
    fastgrpo.unpatch(trainer)
    assert SCORING not in trainer.__dict__


def test_the_handle_is_a_context_manager_that_also_unpatches_after_an_exception(trainer):
    with pytest.raises(RuntimeError, match="on purpose"), fastgrpo.patch(trainer):
        raise RuntimeError("on purpose")
    assert SCORING not in trainer.__dict__


def test_a_stale_handle_does_not_undo_a_later_patch(trainer):
    stale = fastgrpo.patch(trainer)
    stale.unpatch()
    fresh = fastgrpo.patch(trainer)
    stale.unpatch()
    assert fresh.active and trainer.__dict__[SCORING].handle is fresh
    fresh.unpatch()


def test_a_later_override_by_someone_else_is_left_with_a_warning(trainer):
    handle = fastgrpo.patch(trainer)
    foreign = trainer.__dict__[SCORING] = lambda *args, **kwargs: None
    with pytest.warns(UserWarning, match="replaced by something else"):
        handle.unpatch()
    assert trainer.__dict__[SCORING] is foreign


def test_unpatching_by_the_trainer_warns_about_a_later_override_too(trainer):
    fastgrpo.patch(trainer)
    foreign = trainer.__dict__[SCORING] = lambda *args, **kwargs: None
    with pytest.warns(UserWarning, match="replaced by something else"):
        fastgrpo.unpatch(trainer)
    assert trainer.__dict__[SCORING] is foreign


def test_an_earlier_override_on_the_object_is_refused_not_hidden(trainer):
    trainer.__dict__[SCORING] = lambda *args, **kwargs: None
    refused(trainer, fastgrpo.UnsupportedError, "already has an own _get_per_token.*Patch first")


def test_a_dropped_trainer_takes_its_patch_along(tmp_path):
    trainer = tiny_trainer(tmp_path)
    fastgrpo.patch(trainer)
    del trainer
    gc.collect()
    assert trl_utils._ChunkedLogProbFunction is TRL_HEAD and "packing" not in fastgrpo.backends()


def test_two_trainers_are_patched_apart(tmp_path):
    first, second = tiny_trainer(tmp_path), tiny_trainer(tmp_path)
    a, b = fastgrpo.patch(first), fastgrpo.patch(second, fastgrpo.Options(packing="none"))
    a.unpatch()
    assert (trl_utils._ChunkedLogProbFunction is not TRL_HEAD) == compat.has_fused_head() and b.active
    b.unpatch()


def test_other_trainers_in_the_process_keep_trl_s_own_head(tmp_path, trainer, monkeypatch):
    other = tiny_trainer(tmp_path)
    ours = []
    monkeypatch.setattr(heads, "linear_logprob", lambda *a, **k: ours.append(1) or fastgrpo.linear_logprob(*a, **k))
    with fastgrpo.patch(trainer):
        ours.clear()  # the check at patch time
        score(other)
        assert not ours
        score(trainer)
        assert ours


def test_an_exception_in_the_model_leaves_other_trainers_alone(tmp_path, trainer, monkeypatch):
    other = tiny_trainer(tmp_path)
    with fastgrpo.patch(trainer):
        with monkeypatch.context() as broken:
            broken.setattr(trainer.model, "forward", lambda **kwargs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                score(trainer)
        assert heads._current_call.get() is None
        score(other)


def test_values_outside_the_mask_are_zero_and_shapes_are_trl_s(trainer):
    with fastgrpo.patch(trainer):
        logprobs, entropy, aux = score(trainer, compute_entropy=True)
    assert logprobs.shape == entropy.shape == (2, 3) and aux is None
    assert logprobs[1, 2] == 0 and entropy[1, 2] == 0
    assert logprobs[0].ne(0).all() and logprobs.dtype == torch.float32


def test_the_entropy_carries_a_gradient_only_where_the_bonus_is_on(tmp_path):
    for coefficient, wanted in ((0.0, False), (0.1, True)):
        trainer = tiny_trainer(tmp_path, entropy_coef=coefficient)
        with fastgrpo.patch(trainer):
            logprobs, entropy, _ = score(trainer, compute_entropy=True)
        assert logprobs.requires_grad and entropy.requires_grad is wanted


def test_an_all_masked_batch_gives_a_differentiable_zero(trainer):
    ids, mask = torch.tensor([[0, 0, 5, 6], [0, 3, 5, 6]]), torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]])
    with fastgrpo.patch(trainer):
        logprobs, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 2)
    assert logprobs.eq(0).all()
    logprobs.sum().backward()
    gradients = [p.grad for p in trainer.model.parameters() if p.requires_grad]
    assert gradients and all(g is not None and g.eq(0).all() for g in gradients)


def test_a_row_without_a_prompt_is_scored_as_trl_does(trainer):
    """Its first token has nothing before it but padding, so the batch keeps TRL's layout."""
    ids, mask = torch.tensor([[0, 0, 5, 6], [3, 4, 5, 6]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    stock = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 2)[0]
    with fastgrpo.patch(trainer):
        ours = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 2)[0]
    assert (ours - stock).abs().max() < 1e-5


def test_padding_is_cut_and_prompt_rows_are_not_projected(trainer, monkeypatch):
    widths, rows = [], []
    monkeypatch.setattr(
        heads,
        "linear_logprob",
        lambda h, w, t, *a, **k: rows.append(int((t >= 0).sum())) or fastgrpo.linear_logprob(h, w, t, *a, **k),
    )
    hook = trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with fastgrpo.patch(trainer, fastgrpo.Options(packing="left")):
        widths.clear()  # the check at patch time
        rows.clear()
        score(trainer)
    hook.remove()
    assert widths == [5] and rows == [5]


def test_generation_and_checkpoints_are_untouched(trainer):
    keys = list(trainer.model.state_dict())
    with fastgrpo.patch(trainer):
        assert list(trainer.model.state_dict()) == keys
        ids = torch.tensor([[5, 6, 7]])
        assert trainer.model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] <= 5
        assert torch.is_tensor(trainer.model(input_ids=ids).logits)


def test_options_reach_the_head(trainer, monkeypatch):
    seen = []
    monkeypatch.setattr(heads, "linear_logprob", lambda *a, **k: seen.append(k) or fastgrpo.linear_logprob(*a, **k))
    with fastgrpo.patch(trainer, fastgrpo.Options(chunk_bytes=4096, logit_chunk_multiplier=2.0)):
        score(trainer)
    assert seen[0]["chunk_bytes"] == 4096 and seen[0]["logit_chunk_multiplier"] == 2.0


def test_backends_show_the_patch_and_why_rows_are_not_packed(trainer):
    assert "packing" not in fastgrpo.backends()
    with fastgrpo.patch(trainer, fastgrpo.Options(packing="none")):
        assert fastgrpo.backends()["packing"].reason == "packing='none'"
        assert "linear_logprob" in str(fastgrpo.backends())
    assert "packing" not in fastgrpo.backends()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes is 0"),
        ({"num_chunks": 0}, "num_chunks is 0"),
        ({"num_chunks": 2, "logit_chunk_multiplier": 2.0}, "give one of the two"),
        ({"packing": "right"}, "packing is 'right'; choose one of 'auto', 'varlen', 'left', 'none'"),
        ({"share_prefix": 1}, "share_prefix is 1; it must be True or False"),
    ],
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        fastgrpo.Options(**options)
    with pytest.raises(TypeError, match="unexpected keyword"):
        fastgrpo.Options(chunk_byte=3)


def test_options_can_be_pickled():
    options = fastgrpo.Options(num_chunks=3)
    assert pickle.loads(pickle.dumps(options)) == options


def refused(trainer, error, message, options=None):
    before = dict(trainer.__dict__) if hasattr(trainer, "__dict__") else None
    with pytest.raises(error, match=message):
        fastgrpo.patch(trainer, options)
    if before is not None:
        assert trainer.__dict__ == before
    assert trl_utils._ChunkedLogProbFunction is TRL_HEAD


def test_what_is_no_grpo_trainer_is_refused():
    refused("trainer", TypeError, "takes a trl.GRPOTrainer.*given a str")


def test_options_of_another_type_are_refused(trainer):
    refused(trainer, TypeError, "options is a dict; give fastgrpo.Options", {"num_chunks": 2})


def test_another_trl_is_refused_with_the_range_and_what_to_install(trainer, monkeypatch):
    monkeypatch.setattr(compat, "version", lambda name: "1.17.0")
    refused(trainer, fastgrpo.UnsupportedError, r'trl 1.17.0 is installed.*>= 1.12, < 1.17.*pip install "trl>=1.12')


def test_a_trl_without_the_names_is_refused(trainer, monkeypatch):
    monkeypatch.setattr(compat, "HEAD_NAME", "_NoSuchName")
    refused(trainer, fastgrpo.UnsupportedError, "_NoSuchName`, which fastgrpo replaces, is missing")


def test_a_head_from_elsewhere_is_refused(trainer, monkeypatch):
    with monkeypatch.context() as replaced:
        replaced.setattr(trl_utils, compat.HEAD_NAME, type("Other", (), {"__module__": "other.kernels"}))
        with pytest.raises(fastgrpo.UnsupportedError, match=r"is from other\.kernels; something else modified trl"):
            fastgrpo.patch(trainer)


@pytest.mark.parametrize("method", [SCORING, "_compute_loss"])
def test_a_method_replaced_for_all_trainers_is_refused_also_where_the_replacement_wraps_it(
    trainer, method, monkeypatch
):
    original = getattr(GRPOTrainer, method)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, method, wrapper)
    refused(trainer, fastgrpo.UnsupportedError, f"GRPOTrainer.{method} was replaced by .*Make that a subclass")


@pytest.mark.parametrize("method", [SCORING, "_compute_loss"])
def test_a_source_that_was_never_tested_is_refused(trainer, method, monkeypatch):
    monkeypatch.setitem(compat._KNOWN_SOURCES, method, {"0" * 16: "another release"})
    refused(trainer, fastgrpo.UnsupportedError, f"source of GRPOTrainer.{method} in trl .* is none that this version")


def test_single_trained_rows_of_a_tied_embedding_are_refused(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 4])
    trainer = tiny_trainer(tmp_path, "qwen2 tied", lora)
    refused(trainer, fastgrpo.UnsupportedError, "tied to embeddings.*trainable_token_indices.*modules_to_save")


def test_a_head_sharded_over_devices_is_refused(trainer, monkeypatch):
    monkeypatch.setattr(compat, "DTensor", torch.nn.Parameter)
    refused(trainer, fastgrpo.UnsupportedError, "sharded over devices.*without tp_plan")


def test_a_loss_of_the_users_own_is_said(tmp_path, caplog):
    class OwnLoss(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    with fastgrpo.patch(tiny_trainer(tmp_path, trainer_class=OwnLoss)):
        assert "OwnLoss brings its own _compute_loss" in caplog.text


def test_a_scoring_method_of_the_users_own_is_said_and_not_packed(tmp_path, caplog):
    class OwnScoring(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    trainer = tiny_trainer(tmp_path, trainer_class=OwnScoring)
    with fastgrpo.patch(trainer):
        assert "OwnScoring brings its own _get_per_token_logps_and_entropies: it is called" in caplog.text
        assert "brings its own" in fastgrpo.backends()["packing"].reason
    refused(trainer, ValueError, "packing='left' is not possible", fastgrpo.Options(packing="left"))


def test_attention_dropout_is_left_to_the_model(tmp_path):
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    trainer = tiny_trainer(tmp_path, model)
    with fastgrpo.patch(trainer) as handle:
        assert handle.layout == "left" and handle.not_varlen_because == "attention dropout is 0.1"
        trainer.train()
    refused(
        trainer,
        ValueError,
        "packing='varlen' is not possible: attention dropout is 0.1",
        fastgrpo.Options(packing="varlen"),
    )


@pytest.mark.parametrize(
    ("model", "softcap", "advice"),
    [
        ("llama", None, "; 'sdpa' can"),
        (
            "gemma2 softcap",
            50.0,
            ", and the model's softcap of attention scores needs 'eager': transformers has no 'sdpa' for it",
        ),
        ("gemma2 softcap", None, ", and transformers has no 'sdpa' for Gemma2ForCausalLM"),
    ],
)
def test_eager_attention_is_left_packed_and_sdpa_advised_only_where_there_is_one(
    model, softcap, advice, tmp_path, monkeypatch, capsys
):
    model = tiny_model(model)
    monkeypatch.setattr(type(model), "_supports_sdpa", advice == "; 'sdpa' can")  # releases differ
    model.set_attn_implementation("eager")
    model.config.attn_logit_softcapping = softcap
    trainer = tiny_trainer(tmp_path, model)
    reason = f"attn_implementation='eager' cannot be exchanged{advice}"
    with fastgrpo.patch(trainer) as handle:
        assert handle.layout == "left" and handle.not_varlen_because == reason
        trainer.train()
    assert f"left-packed ({reason})" in capsys.readouterr().err
    wanted = f"packing='varlen' is not possible: {reason}; use packing='auto' (rows are left-packed) or 'none'."
    refused(trainer, ValueError, re.escape(wanted), fastgrpo.Options(packing="varlen"))


def test_dropout_is_said_where_packing_changes_the_random_numbers(tmp_path, caplog):
    lora = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.2)
    trainer = tiny_trainer(tmp_path, lora=lora, disable_dropout=False)
    with fastgrpo.patch(trainer, fastgrpo.Options(packing="none")):
        assert "dropout" not in caplog.text
    with fastgrpo.patch(trainer):
        assert "dropout is 0.2: packed rows draw random numbers for fewer tokens" in caplog.text


def test_a_lora_adapter_on_the_head_is_refused(trainer):
    """TRL refuses to build such a trainer; an adapter can still be added to a built one."""
    base = trainer.model.get_base_model()
    holder = torch.nn.ModuleDict({"head": base.lm_head})
    base.lm_head = inject_adapter_in_model(LoraConfig(r=2, target_modules=["head"]), holder)["head"]
    refused(trainer, fastgrpo.UnsupportedError, "output head is a peft.*lm_head.*target_modules")


def test_prompt_learning_is_refused(tmp_path):
    try:
        trainer = tiny_trainer(tmp_path, lora=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    except Exception as error:
        pytest.skip(f"this TRL builds no trainer for prompt tuning: {error}")
    refused(trainer, fastgrpo.UnsupportedError, "prompt learning.*use LoRA")


def test_a_quantised_head_is_refused_by_name(trainer):
    class Linear4bit(torch.nn.Linear):
        pass

    head = trainer.model.get_base_model().lm_head
    trainer.model.get_base_model().lm_head = Linear4bit(head.in_features, head.out_features, bias=False)
    refused(trainer, fastgrpo.UnsupportedError, "Linear4bit.*quantisation")


def test_an_unsloth_class_is_refused(tmp_path):
    cls = type("UnslothGRPOTrainer", (GRPOTrainer,), {"__module__": "unsloth_compiled_cache.UnslothGRPOTrainer"})
    refused(tiny_trainer(tmp_path, trainer_class=cls), fastgrpo.UnsupportedError, "comes from Unsloth")


def test_sharded_trainers_are_refused(trainer):
    trainer.is_fsdp_enabled = True
    refused(trainer, fastgrpo.UnsupportedError, "FSDP, which is not supported yet; use DDP")


def test_zero_3_is_refused_and_zero_2_is_not(trainer, monkeypatch):
    trainer.is_deepspeed_enabled = True
    plugin = types.SimpleNamespace(zero_stage=3)
    monkeypatch.setattr(type(trainer.accelerator.state), "deepspeed_plugin", plugin, raising=False)
    refused(trainer, fastgrpo.UnsupportedError, "DeepSpeed ZeRO-3, which is not supported yet; use ZeRO-2 or lower")
    plugin.zero_stage = 2
    fastgrpo.patch(trainer).unpatch()


@pytest.mark.parametrize("name", ["cp_size", "sp_size", "tp_size"])
def test_parallelism_inside_a_sequence_or_a_layer_is_refused(trainer, monkeypatch, name):
    sizes = types.SimpleNamespace(**{"cp_size": 1, "sp_size": 1, "tp_size": 1, name: 2})
    monkeypatch.setattr(type(trainer.accelerator), "parallelism_config", sizes, raising=False)
    refused(trainer, fastgrpo.UnsupportedError, f"parallelism_config.{name} is 2; only 1 is supported yet")


@pytest.mark.skipif(compat.has_fused_head(), reason="from TRL 1.15 Liger has no part in the loss")
def test_liger_s_loss_is_refused(trainer):
    trainer.args.use_liger_kernel = True
    refused(trainer, fastgrpo.UnsupportedError, "use_liger_kernel=True.*set use_liger_kernel=False")


def test_a_reference_model_is_checked_like_the_policy(trainer):
    trainer.ref_model = tiny_model("llama")
    trainer.ref_model.lm_head = torch.nn.Sequential(trainer.ref_model.lm_head)
    refused(trainer, fastgrpo.UnsupportedError, "The reference model's output head is a torch.*Sequential")


def test_left_packing_is_refused_where_every_width_would_be_compiled(tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.args.torch_compile = True
    refused(trainer, ValueError, "packing='left' is not possible: torch_compile=True", fastgrpo.Options(packing="left"))


def test_left_packing_is_refused_for_state_space_models_and_auto_says_so(trainer, caplog):
    trainer.model.get_base_model()._is_stateful = True
    refused(trainer, ValueError, "packing='left' is not possible.*state-space", fastgrpo.Options(packing="left"))
    with fastgrpo.patch(trainer):
        assert "as TRL pads them" in caplog.text
        assert fastgrpo.backends()["packing"].implementation == "as TRL pads"
        score(trainer)
