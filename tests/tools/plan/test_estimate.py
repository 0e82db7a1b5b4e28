from __future__ import annotations

import dataclasses
import json
import re
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

import fastgrpo
from fastgrpo.tools.plan import estimate
from fastgrpo.tools.plan.advice import _candidates
from fastgrpo.tools.plan.config import config_from_numbers, parse_numbers
from fastgrpo.tools.plan.memory import ENGINE, REFERENCE, RESERVE, STATES, TERMS, UPDATE, WEIGHTS
from fastgrpo.tools.plan.settings import PlanSettings
from fastgrpo.tools.plan.shape import kv_cache_bytes
from fastgrpo.tools.plan.update import head_of

QWEN = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True}
QWEN_1_7B = Qwen3Config(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, **QWEN)
QWEN_4B = Qwen3Config(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, **QWEN)
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
LLAMA = LlamaConfig(**SMALL, tie_word_embeddings=False)
LORA = {"lora_rank": 16}
estimate_memory = partial(estimate.estimate_memory, dtype="bfloat16", completion_length=256)
EXAMPLE = {**LORA, "beta": 0.04, "reference": "separate", "head": "full", "share_prefix": False, "fused_layers": False}


def gb(parameters: float) -> float:
    return parameters / 1e9


def rounded(value: float, digits: int) -> float:
    return round(value, digits)


def test_a_1_7b_adapter_with_a_second_model_on_16_gb_is_the_arithmetic_of_the_example():
    """Assumed: all 8 rollouts are one micro-batch; gradient checkpointing and bf16 autocast, as TRL's defaults."""
    plan = estimate_memory(
        QWEN_1_7B, **EXAMPLE, capacity_gb=16, prompt_length=256, completion_length=512, micro_batch=8, reserve_gb=2
    )
    shown = {name: rounded(size, 1) for name, size in plan.terms.items()}
    assert rounded(shown.pop(UPDATE), 0) == 2
    assert shown == {WEIGHTS: 3.4, STATES: 0.3, REFERENCE: 3.4, ENGINE: 0.7, RESERVE: 2.0}
    assert rounded(plan.details[UPDATE]["head"], 1) == 1.2  # the logits
    assert plan.free == pytest.approx(16 - sum(plan.terms.values()))
    # The example's 4.2 is 16 less terms that are rounded one by one.
    assert rounded(16 - sum(shown.values()) - 2, 1) == 4.2
    assert plan.free == pytest.approx(4.2, abs=0.15)
    assert plan.fits


def test_keys_and_values_of_1_7b_are_112_kib_a_token():
    assert kv_cache_bytes(QWEN_1_7B, 1, 2) == 112 * 1024
    assert kv_cache_bytes(QWEN_1_7B, 768, 2) == 768 * 112 * 1024


def test_a_4b_adapter_beside_vllm_at_0_3_of_128_gb_is_the_arithmetic_of_the_example():
    """The example names no lengths: 12 sequences of 208 + 512 tokens in a micro-batch need the 4 GB it has."""
    plan = estimate_memory(
        QWEN_4B,
        **EXAMPLE,
        capacity_gb=128,
        rollout="vllm",
        vllm_fraction=0.3,
        reserve_gb=4,
        prompt_length=208,
        completion_length=512,
        micro_batch=12,
    )
    assert [rounded(plan.terms[name], 0) for name in (WEIGHTS, REFERENCE, UPDATE, RESERVE)] == [8, 8, 4, 4]
    assert rounded(plan.terms[STATES], 1) == 0.5
    assert rounded(plan.terms[ENGINE], 1) == 38.4
    assert rounded(plan.free, 1) == 65.1


def test_without_a_kl_term_there_is_no_reference_and_with_lora_it_is_the_disabled_adapter():
    weights = estimate_memory(LLAMA).terms[WEIGHTS]
    assert weights > 0
    for settings, expected in (
        ({"beta": 0.0}, 0.0),
        ({"beta": 0.0, **LORA, "reference": "separate"}, 0.0),
        ({"beta": 0.1}, weights),
        ({"beta": 0.1, **LORA}, 0.0),
        ({"beta": 0.1, **LORA, "reference": "none"}, 0.0),
        ({"beta": 0.1, **LORA, "reference": "separate"}, weights),
    ):
        assert estimate_memory(LLAMA, **settings).terms[REFERENCE] == expected, settings


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        LlamaConfig(**SMALL, tie_word_embeddings=True),
        Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100),
    ],
    ids=["untied", "tied", "experts", "gpt2"],
)
def test_parameters_are_those_of_the_built_model(config: PretrainedConfig):
    model = AutoModelForCausalLM.from_config(config)
    plan = estimate_memory(config)
    assert plan.shape.parameters == model.num_parameters()
    assert plan.terms[WEIGHTS] == pytest.approx(gb(2 * model.num_parameters()))
    assert estimate_memory(config, dtype="float32").terms[WEIGHTS] == pytest.approx(gb(4 * model.num_parameters()))


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj"), r".*\.layers\.[01]\.mlp\.(gate|up)_proj"])
def test_the_adapter_is_pefts_and_costs_16_bytes_a_parameter(targets):
    plan = estimate_memory(LLAMA, lora_rank=8, lora_targets=targets)
    model = get_peft_model(
        AutoModelForCausalLM.from_config(LLAMA),
        LoraConfig(r=8, target_modules=targets if isinstance(targets, str) else list(targets)),
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert plan.shape.adapter_parameters == trained > 0
    assert plan.terms[STATES] == pytest.approx(gb(16 * trained))


def test_a_4_bit_base_holds_its_linear_layers_in_half_a_byte_and_a_scale_for_each_64():
    plan = estimate_memory(LLAMA, **LORA, quantization="4bit")
    model = AutoModelForCausalLM.from_config(LLAMA)
    linear = sum(p.numel() for name, p in model.named_parameters() if "_proj" in name)
    assert plan.shape.linear_parameters == linear
    assert plan.terms[WEIGHTS] == pytest.approx(gb(linear * 0.5625 + 2 * (model.num_parameters() - linear)))


def test_a_checkpoint_that_says_it_is_quantised_is_planned_so():
    config = LlamaConfig(**SMALL, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert estimate_memory(config, **LORA).settings.quantization == "4bit"
    with pytest.raises(ValueError, match="'gptq'; the plan knows"):
        estimate_memory(LlamaConfig(**SMALL, quantization_config={"quant_method": "gptq"}), **LORA)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "states"),
    [
        ("adamw", "bfloat16", 4),
        ("adamw", "float32", 8),
        ("adamw_fp32", "bfloat16", 12),
        ("adamw_fp32", "float32", 8),
        ("paged_adamw", "bfloat16", 0),
        ("paged_adamw_8bit", "bfloat16", 0),
        ("sgd", "bfloat16", 0),
    ],
)
def test_optimizer_states_of_full_fine_tuning(optimizer, dtype, states):
    plan = estimate_memory(LLAMA, optimizer=optimizer, dtype=dtype)
    itemsize = 4 if dtype == "float32" else 2
    assert plan.details[STATES]["gradients"] == pytest.approx(gb(itemsize * plan.shape.parameters))
    assert plan.details[STATES]["optimizer states"] == pytest.approx(gb(states * plan.shape.parameters))
    assert any("host memory" in note for note in plan.notes) == optimizer.startswith("paged")


def test_8_bit_states_have_a_scale_for_each_256_and_embeddings_keep_32_bit():
    plan = estimate_memory(LLAMA, optimizer="adamw_8bit")
    embeddings = SMALL["vocab_size"] * SMALL["hidden_size"]
    rest = plan.shape.parameters - embeddings
    assert plan.details[STATES]["optimizer states"] == pytest.approx(gb(rest * 2 * (1 + 4 / 256) + embeddings * 8))


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients", "states"),
    [
        ("ddp", 1, 2, 4),  # DDP's buckets are a second copy of the gradients
        ("zero1", 1, 1, 12 / 8),  # DeepSpeed: float32 states and a float32 copy
        ("zero2", 1, 1 / 8, 12 / 8),
        ("zero3", 1 / 8, 1 / 8, 12 / 8),
        ("fsdp2", 1 / 8, 1 / 8, 4 / 8),
    ],
)
def test_what_eight_devices_share(sharding, weights, gradients, states):
    plan = estimate_memory(LLAMA, world_size=8, sharding=sharding)
    share = plan.details[WEIGHTS].get("weights, a share", plan.details[WEIGHTS].get("weights"))
    n = plan.shape.parameters
    assert share == pytest.approx(gb(2 * n * weights))
    assert plan.details[STATES]["gradients"] == pytest.approx(gb(2 * n * gradients))
    assert plan.details[STATES]["optimizer states"] == pytest.approx(gb(n * states))
    assert ("gathered for use" in plan.details[WEIGHTS]) == (weights < 1)
    assert any("refuses" in note for note in plan.notes) == (weights < 1)


def test_one_device_shards_nothing():
    assert estimate_memory(LLAMA, sharding="zero3").terms[WEIGHTS] == estimate_memory(LLAMA).terms[WEIGHTS]


def test_a_rollout_server_costs_nothing_here_and_a_sleeping_engine_shares_with_the_update():
    settings = {**LORA, "capacity_gb": 1.0, "reserve_gb": 0.0}
    here = estimate_memory(LLAMA, **settings)
    server = estimate_memory(LLAMA, **settings, rollout="server")
    assert here.total - server.total == pytest.approx(here.terms[ENGINE])
    assert here.terms[ENGINE] == pytest.approx(gb(8 * kv_cache_bytes(LLAMA, 512 + 256, 2)))
    awake = estimate_memory(LLAMA, **settings, rollout="vllm", vllm_fraction=0.4)
    asleep = estimate_memory(LLAMA, **settings, rollout="vllm", vllm_fraction=0.4, vllm_sleep=True)
    assert awake.terms[ENGINE] == asleep.terms[ENGINE] == pytest.approx(0.4)
    update = awake.terms[UPDATE] + awake.details[STATES]["gradients"]
    assert awake.total - asleep.total == pytest.approx(min(awake.terms[ENGINE], update))


def test_an_engine_without_room_for_one_sequence_does_not_fit():
    plan = estimate_memory(QWEN_1_7B, **LORA, capacity_gb=16, rollout="vllm", vllm_fraction=0.2)
    assert plan.free > 0 and plan.fits is False
    assert any("vLLM will not start" in note for note in plan.notes)


def test_several_micro_batches_generated_together_share_one_cache():
    one, four = (estimate_memory(LLAMA, accumulation=n).terms[ENGINE] for n in (1, 4))
    assert four == pytest.approx(4 * one)


def test_windows_bound_the_cache_and_layers_without_attention_have_none():
    config = Qwen3Config(
        **SMALL,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_sliding_window=True,
        sliding_window=10,
    )
    assert kv_cache_bytes(config, 100, 2) == (100 + 100 + 10 + 10) * 2 * 2 * 16 * 2
    config.layer_types = ["linear_attention"] * 3 + ["full_attention"]
    assert kv_cache_bytes(config, 100, 2) == 100 * 2 * 2 * 16 * 2


def test_checkpointing_keeps_one_input_a_layer_in_the_weights_dtype():
    few, many = (
        estimate_memory(LlamaConfig(**{**SMALL, "num_hidden_layers": n})).details[UPDATE]["kept for the backward"]
        for n in (3, 7)
    )
    assert many - few == pytest.approx(gb(4 * (512 + 8 * 256) * 64 * 2))
    plain = estimate_memory(LLAMA, checkpointing=False).details[UPDATE]
    assert plain["kept for the backward"] > 4 * many
    assert estimate_memory(LLAMA, offload_activations=True).details[UPDATE]["kept for the backward"] < few


def test_what_bounds_the_rows_alive_bounds_the_update():
    whole = estimate_memory(LLAMA, micro_batch=16, share_prefix=False).terms[UPDATE]
    for changes in ({"mini_batch": 4}, {"longest_row": 300}, {"share_prefix": True}):
        smaller = estimate_memory(LLAMA, micro_batch=16, **{"share_prefix": False, **changes})
        assert smaller.terms[UPDATE] < 0.9 * whole, changes
        assert smaller.terms[ENGINE] == estimate_memory(LLAMA, micro_batch=16).terms[ENGINE]


def test_mini_batches_are_advised_and_full_fine_tuning_sums_their_gradients():
    settings = {"micro_batch": 16, "prompt_length": 2048, "share_prefix": False}
    plan = estimate_memory(LLAMA, **LORA, **settings)
    halved = estimate_memory(LLAMA, **LORA, **settings, mini_batch=8)
    (advised,) = (a for a in plan.alternatives if a.setting.startswith("--mini-batch 8 "))
    assert advised.frees_gb == pytest.approx(plan.total - halved.total)
    full = {**settings, "mini_batch": 8, "optimizer": "sgd"}
    alone, added = (estimate_memory(LLAMA, **full, accumulation=n).peaks["layers"] for n in (1, 2))
    assert added - alone == pytest.approx(halved.terms[WEIGHTS], rel=1e-3)


def test_offloading_is_advised_and_needs_host_memory():
    settings = {**LORA, "micro_batch": 32, "prompt_length": 4096, "share_prefix": False}
    plan = estimate_memory(QWEN_1_7B, **settings)
    (advised,) = (a for a in plan.alternatives if a.setting.startswith("--offload-activations"))
    offloaded = estimate_memory(QWEN_1_7B, **settings, offload_activations=True)
    assert advised.frees_gb == pytest.approx(plan.total - offloaded.total)
    note = f"{gb(28 * 32 * (4096 + 256) * 2048 * 2):.1f} GB of activations wait in host memory"
    assert note in offloaded.notes
    assert note in estimate_memory(QWEN_1_7B, **settings, offload_activations=True, mini_batch=4).notes
    with pytest.raises(ValueError, match="offload_activations=True needs checkpointing=True"):
        PlanSettings(offload_activations=True, checkpointing=False)


def test_a_group_has_its_prompt_once_in_the_update():
    settings = PlanSettings(micro_batch=16, num_generations=8, prompt_length=100, completion_length=30)
    assert settings.rows == (1, 2 * 100 + 16 * 30)
    assert dataclasses.replace(settings, num_generations=32).rows == (1, 100 + 16 * 30)
    assert dataclasses.replace(settings, share_prefix=False).rows == (16, 130)
    assert dataclasses.replace(settings, share_prefix=False, longest_row=90).rows == (16, 90)


def test_chunk_bytes_bound_the_head():
    settings = {**LORA, "micro_batch": 16, "completion_length": 1024}
    sizes = [
        estimate_memory(QWEN_1_7B, **settings, chunk_bytes=mib << 20).details[UPDATE]["head"] for mib in (512, 1024)
    ]
    # Chunks are multiples of 256 rows, and from 1024 on of that.
    assert sizes[1] - sizes[0] == pytest.approx((1024 - 768) * 151936 * 4 / 1e9)
    assert sizes[0] < 0.25 * estimate_memory(QWEN_1_7B, **settings, head="full").details[UPDATE]["head"]


def test_layers_measured_on_an_h200_were_predicted_within_3_percent():
    """bench/results/update-h200-2026-11-29.json: 1.7B, rank 16, before layers ran as one function each; 20167 MiB."""
    plan = estimate_memory(
        QWEN_1_7B,
        **LORA,
        checkpointing=False,
        fused_layers=False,
        micro_batch=1,
        num_generations=1,
        prompt_length=768,
        completion_length=5495,
    )
    predicted_mib = (plan.peaks["layers"] - plan.peaks["held"]) * 1e9 / 2**20
    assert predicted_mib == pytest.approx(20166.9, rel=0.03), predicted_mib


@pytest.mark.parametrize(
    ("rows", "hidden", "words", "full", "parts", "measured_mib"),
    [
        (8192, 2048, 151936, False, 1, 515.3),
        (16384, 1024, 151936, False, 1, 512.4),
        (8192, 4096, 128256, False, 1, 645.2),
        (8192, 4096, 128256, True, 1, 3699.4),
        (8192, 4096, 128256, True, 2, 4573.2),
    ],
)
def test_the_head_measured_on_an_h200_was_predicted_within_3_percent(rows, hidden, words, full, parts, measured_mib):
    """bench/results/head-h200-2026-11-29.json: the head alone, in one pass or two; hidden states are not copied there."""
    settings = PlanSettings(
        lora_rank=None if full else 16,
        micro_batch=parts,
        mini_batch=1,
        num_generations=1,
        prompt_length=1,
        completion_length=rows,
        dtype="bfloat16",
    )
    shape = dataclasses.replace(estimate_memory(LLAMA).shape, hidden=hidden, vocabulary=words)
    head, taken = head_of(settings, shape), rows * hidden * 2
    extra = max(head.forward, head.backward) - taken
    assert extra / 2**20 == pytest.approx(measured_mib, rel=0.03)


@pytest.mark.parametrize("kind", ["frozen", "in one pass", "twice"])
@pytest.mark.parametrize(
    ("rows", "hidden", "words", "measured_mib"),
    [
        (8192, 896, 151936, (334.1, 1779.5, 1980.9)),
        (16384, 2048, 151936, (434.9, 2555.9, 3031.9)),
        (2048, 4096, 128256, (548.7, 1607.1, 1559.1)),
        (8192, 4096, 128256, (644.8, 3198.1, 4072.2)),
        (8192, 5120, 152064, (468.1, 4695.1, 5723.2)),
        (32768, 1024, 151936, (435.1, 1955.1, 2142.0)),
        (8192, 2304, 262144, (600.1, 4506.4, 5540.2)),
    ],
)
def test_the_fused_head_measured_on_an_h200_is_predicted_within_3_percent(rows, hidden, words, measured_mib, kind):
    """bench/results/head-h200-2026-11-30-waiting.json: the head alone; hidden states are not copied there."""
    settings = PlanSettings(
        lora_rank=16 if kind == "frozen" else None,
        micro_batch=2 if kind == "twice" else 1,
        mini_batch=1,
        num_generations=1,
        prompt_length=1,
        completion_length=rows,
        dtype="bfloat16",
        fused_head=True,
    )
    shape = dataclasses.replace(estimate_memory(LLAMA).shape, hidden=hidden, vocabulary=words)
    head, taken = head_of(settings, shape), rows * hidden * 2
    measured = measured_mib[("frozen", "in one pass", "twice").index(kind)]
    assert (max(head.forward, head.backward) - taken) / 2**20 == pytest.approx(measured, rel=0.03)


def test_heads_that_the_fused_kernel_does_not_serve_are_planned_as_the_row_kernels_serve_them():
    odd, settings = dataclasses.replace(estimate_memory(LLAMA).shape, hidden=4100), {**LORA, "micro_batch": 16}
    for options in ({"mixed_precision": "fp16"}, {"mixed_precision": "no", "dtype": "float32"}, {}):
        plans = [PlanSettings(**{**settings, **options}, fused_head=fused) for fused in (True, False)]
        assert head_of(plans[0], odd) == head_of(plans[1], odd)


def test_the_head_measured_on_a_cpu_was_predicted_within_5_percent():
    """bench/results/head-cpu-2026-11-29.json (128 MiB, float32)."""
    settings = PlanSettings(
        lora_rank=16,
        micro_batch=1,
        num_generations=1,
        prompt_length=768,
        completion_length=1230,
        dtype="float32",
        mixed_precision="no",
        chunk_bytes=128 << 20,
    )
    head = head_of(settings, dataclasses.replace(estimate_memory(LLAMA).shape, hidden=576, vocabulary=49152))
    assert (head.forward - 1230 * 576 * 4) / 2**20 == pytest.approx(197, rel=0.05)


def test_the_advice_is_the_largest_difference_of_two_plans():
    plan = estimate_memory(LLAMA, beta=0.1, capacity_gb=1.0, micro_batch=32, checkpointing=False)
    frees = [alternative.frees_gb for alternative in plan.alternatives]
    assert frees == sorted(frees, reverse=True) and frees
    best = plan.alternatives[0]
    assert plan.advice == f"{best.setting} would free {best.frees_gb:.1f} GB"
    by_setting = {alternative.setting.split(" (")[0]: alternative for alternative in plan.alternatives}
    other = estimate_memory(LLAMA, beta=0.1, capacity_gb=1.0, micro_batch=32, checkpointing=True)
    assert by_setting["--checkpointing"].frees_gb == pytest.approx(plan.total - other.total)
    assert by_setting["--checkpointing"].fits == other.fits


def test_what_fits_is_judged_only_against_a_capacity():
    total = estimate_memory(LLAMA).total
    assert estimate_memory(LLAMA).fits is None
    assert estimate_memory(LLAMA, capacity_gb=total + 0.01).fits is True
    plan = estimate_memory(LLAMA, capacity_gb=total - 0.01)
    assert plan.fits is False and plan.free < 0


def test_layers_that_cannot_be_followed_fall_back_to_a_rule_and_say_so(monkeypatch):
    exact = estimate_memory(LLAMA, checkpointing=False, fused_layers=False)
    monkeypatch.setattr(estimate, "trace", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("needs values")))
    plan = estimate_memory(LLAMA, checkpointing=False)
    assert any("rule of thumb" in note and "needs values" in note for note in plan.notes)
    assert plan.terms[UPDATE] == pytest.approx(exact.terms[UPDATE], rel=0.4)


def test_more_tokens_than_the_models_context_are_noted():
    plan = estimate_memory(LlamaConfig(**SMALL, max_position_embeddings=512), prompt_length=400, completion_length=400)
    assert any("800 tokens; the model's context is 512" in note for note in plan.notes)


def test_a_plan_is_strict_json():
    plan = estimate_memory(LLAMA, **LORA, capacity_gb=1.0)
    document = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert tuple(document["terms_gb"]) == TERMS
    assert document["total_gb"] == plan.total and document["fits"] == plan.fits
    assert document["settings"]["lora_rank"] == 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; choose one of 'bfloat16'"),
        ({"optimizer": "lion"}, "optimizer is 'lion'; choose one of"),
        ({"micro_batch": 0}, "micro_batch is 0; give a whole number from 1 to 100,000"),
        ({"beta": -0.1}, "beta is -0.1; give a number from 0 to 1,000,000,000"),
        ({"beta": float("nan")}, "beta is nan; give a number from 0"),
        ({"reserve_gb": float("inf")}, "reserve_gb is inf; give a number from 0 to 1,000,000"),
        ({"capacity_gb": 0}, "capacity_gb is 0; give a number above 0, at most 1,000,000"),
        ({"vllm_fraction": 0}, "vllm_fraction is 0; give a number above 0, at most 1"),
        (
            {"prompt_length": 10**20},
            "prompt_length is 100000000000000000000; give a whole number from 1 to 1,000,000,000",
        ),
        ({"micro_batch": 10**4, "prompt_length": 10**8}, "more than the 10,000,000,000 tokens that can be planned"),
        ({"lora_rank": 10**20}, "lora_rank is 100000000000000000000; give a whole number from 1 to 100,000"),
        (
            {"lora_targets": ("q_proj",)},
            "has no meaning in full fine-tuning, where everything trains; give lora_rank too",
        ),
        ({"lora_rank": 4, "lora_targets": "(["}, "lora_targets='([' is no regular expression: unterminated"),
        ({"lora_rank": 4, "lora_targets": ""}, "lora_targets is '', which names no layer"),
        ({"lora_rank": 4, "lora_targets": ("",)}, "which names no layer"),
        (
            {"mini_batch": 9},
            "mini_batch is 9, more than the 8 sequences that a device trains on between two generations",
        ),
        ({"mini_batch": 4, "sharding": "zero2", "world_size": 2}, "does not go with sharding='zero2'"),
        ({"num_chunks": 2, "logit_chunk_multiplier": 2.0}, "give one of the two"),
        ({"quantization": "4bit"}, "give lora_rank"),
        ({"beta": 0.1, "reference": "none"}, "second model"),
        ({"rollout": "vllm"}, "give capacity_gb"),
        ({"vllm_fraction": 1.5}, "vllm_fraction is 1.5"),
        ({"longest_row": 9999}, "longest_row is 9999, more than"),
        ({"longest_row": 10}, "less than completion_length"),
        ({"lora_rank": 4, "lora_targets": ("nope",)}, "linear layers are down_proj, gate_proj"),
    ],
)
def test_settings_that_are_wrong_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        estimate_memory(LLAMA, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batch": 2.5}, "micro_batch is 2.5; give a whole number from 1"),
        ({"micro_batch": "8"}, "micro_batch is '8'; give a whole number"),
        ({"beta": None}, "beta is None; give a number from 0"),
        ({"checkpointing": "yes"}, "checkpointing is 'yes'; give True or False"),
        (
            {"lora_rank": 2, "lora_targets": 3},
            "lora_targets is 3; give 'all-linear', names of layers, or a regular expression",
        ),
        ({"lora_rank": 2, "lora_targets": ["q_proj", 3]}, "give 'all-linear', names"),
        ({"microbatch": 2}, "a plan has no setting microbatch (micro_batch?). Its settings are capacity_gb,"),
    ],
)
def test_settings_of_a_wrong_type_or_name_are_refused(settings, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        estimate_memory(LLAMA, **settings)


def test_a_model_is_a_folder_a_file_a_configuration_or_has_one(tmp_path):
    LLAMA.save_pretrained(tmp_path / "small")
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(LLAMA)
    models = str(tmp_path / "small"), tmp_path / "small" / "config.json", LLAMA, built
    plans = [estimate_memory(model) for model in models]
    assert len({plan.total for plan in plans}) == 1
    assert plans[0].shape.name == plans[1].shape.name == "small"
    with pytest.raises(ValueError, match=r"there is no .*nowhere"):
        estimate_memory(str(tmp_path / "nowhere"))
    with pytest.raises(TypeError, match="model is a int; give a folder"):
        estimate_memory(3)
    with pytest.raises(TypeError, match="model is a Linear; give a folder"):
        estimate_memory(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="settings is 3; give PlanSettings or None"):
        estimate_memory(LLAMA, settings=3)


def test_numbers_describe_a_llama():
    numbers = parse_numbers("hidden=64, layers=4,heads=4,kv_heads=2,intermediate=128,vocabulary=500,tied=false")
    assert estimate_memory(config_from_numbers(**numbers)).total == estimate_memory(LLAMA).total
    for text, message in (("hidden", "no NAME=NUMBER"), ("hidden=a", "no NAME=NUMBER")):
        with pytest.raises(ValueError, match=message):
            parse_numbers(text)
    with pytest.raises(ValueError, match="no number width"):
        config_from_numbers(width=3)
    with pytest.raises(ValueError, match="layers, heads, intermediate, vocabulary is missing"):
        config_from_numbers(hidden=3)


def test_the_public_names_are_these():
    assert fastgrpo.estimate_memory is estimate.estimate_memory
    assert fastgrpo.PlanSettings is PlanSettings


def test_the_device_is_not_touched_and_random_numbers_stay(monkeypatch):
    state = torch.get_rng_state()
    estimate_memory(LLAMA, **LORA)
    assert torch.equal(torch.get_rng_state(), state)


def test_eight_sequences_of_20480_tokens_on_an_8b_model_need_less_than_22_5_gb():
    """The attention of a layer in its backward is the peak; with the MLP's layers one by one it was the MLP, 2.6 GB above."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )
    one_at_a_time = {"mini_batch": 1, "offload_activations": True, "rollout": "server"}
    plan = estimate_memory(config, **LORA, prompt_length=480, completion_length=20000, **one_at_a_time)
    assert plan.peaks["update"] == pytest.approx(19.5, abs=0.1)
    assert plan.details[UPDATE]["a layer at work"] == pytest.approx(2.02, abs=0.03)


def test_packing_says_how_many_tokens_there_are():
    settings = PlanSettings(micro_batch=8, prompt_length=100, completion_length=30, longest_row=90)
    one_row, left, padded = (dataclasses.replace(settings, packing=packing) for packing in ("varlen", "left", "none"))
    assert settings.rows == one_row.rows == (1, 100 + 8 * 30)
    assert left.rows == (8, 90) and padded.rows == (8, 130)
    assert dataclasses.replace(settings, share_prefix=False).rows == (8, 90)
    totals = [estimate.estimate_memory(LLAMA, settings=s).terms[UPDATE] for s in (one_row, left, padded)]
    assert totals == sorted(totals) and len(set(totals)) == 3
    assert "--packing auto (no padding, a prompt once)" in dict(_candidates(left))


def test_micro_batches_generated_together_are_not_those_of_a_step():
    plan = estimate_memory(LLAMA, accumulation=2, steps_per_generation=6)
    assert plan.terms[ENGINE] == pytest.approx(6 * estimate_memory(LLAMA).terms[ENGINE])
    assert plan.peaks["layers"] == estimate_memory(LLAMA, accumulation=2).peaks["layers"]
    advised = dict(_candidates(plan.settings))
    halved = {"micro_batch": 4, "accumulation": 4, "steps_per_generation": 12}
    assert advised["--micro-batch 4 --accumulation 4 --steps-per-generation 12"] == halved
    assert advised["--steps-per-generation 2 (fewer sequences generated at once)"] == {"steps_per_generation": 2}
    note = "12 sequences generated together are no multiple of num_generations=8; TRL refuses that"
    assert note in estimate_memory(LLAMA, micro_batch=6, accumulation=2).notes


def test_tokens_alive_at_once_are_bounded_as_sequences_are():
    settings = {**LORA, "micro_batch": 32, "prompt_length": 512}
    whole = estimate_memory(LLAMA, **settings)
    eight = estimate_memory(LLAMA, **settings, mini_batch=8)
    tokens = estimate_memory(LLAMA, **settings, max_tokens_per_microbatch=512 + 8 * 256)
    assert tokens.terms == eight.terms and tokens.terms[UPDATE] < whole.terms[UPDATE]
    one = estimate_memory(LLAMA, **settings, max_tokens_per_microbatch=1)
    assert one.settings.row_tokens == 512 + 256
    assert any("a sequence of 768 tokens is more than max_tokens_per_microbatch=1" in note for note in one.notes)
    idle = estimate_memory(LLAMA, accumulation=2, mini_batch=12)
    assert idle.terms == estimate_memory(LLAMA, accumulation=2).terms
    assert any(note.startswith("mini_batch=12 takes nothing apart here") for note in idle.notes)


def test_precision_says_what_products_take():
    settings = {"micro_batch": 16, "completion_length": 1024, "dtype": "float32"}
    bf16, fp16, none = (
        estimate_memory(LLAMA, **settings, checkpointing=False, mixed_precision=name).details[UPDATE]
        for name in ("bf16", "fp16", "no")
    )
    assert none["kept for the backward"] > bf16["kept for the backward"]
    assert fp16 == bf16
    scaler = estimate_memory(LLAMA, dtype="float16", mixed_precision="fp16").notes
    assert any("gradient scaler refuses float16 weights" in note for note in scaler)


def test_defaults_are_trls():
    from trl import GRPOConfig

    ours, theirs = PlanSettings(), GRPOConfig
    for name, attribute in {
        "num_generations": "num_generations",
        "completion_length": "max_completion_length",
        "micro_batch": "per_device_train_batch_size",
        "accumulation": "gradient_accumulation_steps",
        "steps_per_generation": "steps_per_generation",
        "checkpointing": "gradient_checkpointing",
        "beta": "beta",
        "vllm_fraction": "vllm_gpu_memory_utilization",
        "vllm_sleep": "vllm_enable_sleep_mode",
    }.items():
        assert getattr(ours, name) == theirs.__dataclass_fields__[attribute].default, name
    assert ours.dtype == "float32"  # of a model that TRL is given by name


def test_an_adapter_on_a_quantised_base_is_in_bfloat16():
    plan = estimate_memory(LLAMA, **LORA, quantization="4bit")
    assert plan.terms[STATES] == pytest.approx(gb(8 * plan.shape.adapter_parameters))


def test_chunks_are_those_of_the_options():
    settings = {**LORA, "micro_batch": 16, "completion_length": 1024}
    shape = dataclasses.replace(estimate_memory(LLAMA, **LORA).shape, hidden=2048, vocabulary=151936)
    sizes = [
        head_of(PlanSettings(**settings, **chunks), shape).forward / 1e9
        for chunks in ({"num_chunks": 32}, {"num_chunks": 64}, {"logit_chunk_multiplier": 0.5}, {})
    ]
    assert sizes[0] - sizes[1] == pytest.approx(256 * 151936 * 4 / 1e9)
    assert sizes[2] - sizes[3] == pytest.approx((1024 - 768) * 151936 * 4 / 1e9)
