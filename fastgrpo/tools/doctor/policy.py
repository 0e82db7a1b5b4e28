"""The layer of the model: trainable parameters, tokenizer, context."""

from __future__ import annotations

from collections.abc import Iterator

from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from fastgrpo.tools.checkpoint import check_weights, context_of, folder_of, load_tokenizer, read_model_config
from fastgrpo.tools.demo.quiet import quiet_libraries
from fastgrpo.tools.doctor.case import Case, Line, fault
from fastgrpo.tools.evaluate import tokenised
from fastgrpo.tools.plan.shape import ModelShape, build, measure
from fastgrpo.tools.wording import ToolError, reason

_COMPLETION = 256
"""TRL's `max_completion_length`."""


def check_policy(case: Case) -> Iterator[Line]:
    """Whether the model can be loaded, what of it trains, and whether its tokenizer and context fit the prompts."""
    if case.model is None:
        yield Line("trained", "skipped", "no --model given")
        return
    try:
        with quiet_libraries():
            folder = folder_of(case.model)
            config = read_model_config(folder)
            context = context_of(config)
            check_weights(folder, config)
            shape = _measure(case, config)
    except ToolError as error:
        yield fault("trained" if "target_modules" in str(error) else "model", error)
        return
    trained = shape.adapter_parameters if case.lora_rank else shape.parameters
    how = f"LoRA of rank {case.lora_rank}" if case.lora_rank else "all of the model"
    yield Line("trained", "ok", f"{_parameters(trained)} of {_parameters(shape.parameters)} parameters ({how})")
    if trained > shape.parameters:
        yield Line("trained", "hint", "the adapter is larger than the model", "a smaller lora_r does as well")
    if shape.parameters < 1.5e9:
        yield Line(
            "trained",
            "hint",
            f"{_parameters(shape.parameters)} parameters; below 1.5 B, models seldom learn to reason at length "
            "(Unsloth's reinforcement learning guide)",
        )
    try:
        with quiet_libraries():
            tokenizer = load_tokenizer(str(folder))
            lines = list(check_tokenizer(case, tokenizer, context, shape.vocabulary))
    except ToolError as error:
        lines = [fault("tokenizer", error)]
    yield from lines


def _parameters(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"


def _measure(case: Case, config: PretrainedConfig) -> ModelShape:
    targets = case.lora_targets
    if targets is None and case.lora_rank:
        targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(config.model_type)
        if targets is None:
            raise ToolError(
                f"target_modules are not given, and peft has none for models of type {config.model_type}",
                "set lora_target_modules: all-linear, or names of layers",
            )
    try:
        model = build(config, "bfloat16", case.lora_rank, targets or ())
        if hasattr(model, "peft_config") and hasattr(model.get_base_model().get_output_embeddings(), "lora_A"):
            raise ToolError(
                "target_modules have the output head among them, whose adapter TRL refuses",
                "leave the head out of them",
            )
        return measure(str(case.model), model)
    except ToolError:
        raise
    except Exception as error:  # what a configuration that does not build raises is as varied as configurations
        text = reason(error)
        if "lora_targets" in text:
            raise ToolError(
                str(error).replace("lora_targets=", "target_modules="), "name layers that exist; `all-linear` takes all"
            ) from error
        raise ToolError(f"{case.model} does not build a model: {text}", "restore its config.json") from error


def check_tokenizer(
    case: Case, tokenizer: PreTrainedTokenizerBase, context: int | None, vocabulary: int | None = None
) -> Iterator[Line]:
    """
    Padding, and prompts against the context of the model.

    Args:
        case: what is asked about.
        tokenizer: of the model.
        context: tokens that the model was made for; None = unknown.
        vocabulary: tokens that the model knows; None = unknown.

    Raises:
        ToolError: prompts that do not become tokens of the model.
    """
    if tokenizer.eos_token_id is None:
        bare = tokenizer.pad_token_id is None
        yield Line(
            "tokenizer",
            "wrong",
            f"it has no end-of-sequence token, which TRL ends completions with{', and none to pad with' if bare else ''}",
            f"set tokenizer.eos_token{' and tokenizer.pad_token' if bare else ''}, and save it beside the model",
        )
        return
    if tokenizer.pad_token_id is None:
        text = f"there is no pad token; TRL pads with the end token {tokenizer.eos_token!r}"
        yield Line("tokenizer", "hint", text, "set tokenizer.pad_token where another token is meant")
    completion = int(case.settings.get("max_completion_length") or _COMPLETION)
    if context is not None and completion >= context:
        yield Line(
            "tokenizer",
            "wrong",
            f"max_completion_length is {completion}{'' if 'max_completion_length' in case.settings else ' (the default)'}, and "
            f"the model's context has {context} tokens, prompt included",
            f"set it below {context} less the longest prompt (--config)",
        )
        return
    lengths = [len(ids) for ids in tokenised(tokenizer, [row["prompt"] for row in case.rows], vocabulary)]
    if not lengths or context is None:
        yield Line("tokenizer", "ok", f"{len(tokenizer)} tokens; context {context or 'unknown'}")
        return
    longest = max(lengths)
    too_long = sum(length + completion > context for length in lengths)
    if too_long:
        yield Line(
            "tokenizer",
            "wrong",
            f"{too_long} of {len(lengths)} prompts are too long: the longest has {longest} tokens, with {completion} of "
            f"completion more than the model's context of {context}",
            "drop or shorten them, TRL does not; or lower max_completion_length",
        )
        return
    yield Line("tokenizer", "ok", f"longest prompt {longest} + completion {completion} of {context} tokens of context")


def check_settings(case: Case) -> Iterator[Line]:
    """Hints where settings are outside common advice."""
    settings = case.settings
    guide = "Unsloth's reinforcement learning guide"
    steps = settings.get("max_steps")
    if steps and 0 < int(steps) < 300:
        yield Line("settings", "hint", f"max_steps is {steps}; rewards often rise only after 300 ({guide})")
    if case.rows and len(case.rows) < 500:
        yield Line("settings", "hint", f"the dataset has {len(case.rows)} rows; 500 or more are advised ({guide})")
    delta, epsilon = settings.get("delta"), float(settings.get("epsilon") or 0.2)
    if delta is not None and float(delta) <= 1 + epsilon:
        yield Line(
            "settings",
            "hint",
            f"delta is {delta}, not above 1 + epsilon = {1 + epsilon:g}, so it cuts what epsilon leaves (INTELLECT-2 report)",
            "raise delta",
        )
