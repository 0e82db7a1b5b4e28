"""`python -m bench update`: one optimizer step of a real `GRPOTrainer` without generation, stock and patched."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from torch import Tensor

import fastgrpo
from bench import report
from bench.measure import MIB, Timing, extra_peak_bytes, interleave
from bench.peers import Problem, peers
from bench.vision import INPUTS, RESERVED, Processor, Tower

STOCK, PATCHED = "TRL", "fastgrpo"
LORA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Workload:
    """
    A model and a generation batch.

    Args:
        name: as printed.
        hidden, layers, heads, kv_heads, intermediate, vocabulary: of a model.
        prompts, completions: distinct prompts, and completions for each of them.
        micro_batch: sequences in a forward; the others follow in further accumulation steps.
        prompt_tokens: shortest and longest prompt.
        completion_median, completion_spread: of the log-normal completion lengths: tokens, and sigma of the logarithm.
        completion_max: longest completion (`max_completion_length`).
        spread: standard deviation of the weights. Scores of an attention without norms have one of about width x spread^2; far
            above 1, two bf16 runs of many layers have hardly a digit of their gradients in common.
        family: `"llama"` or `"qwen3"`.
        shared: the completions of a prompt have it in common; False = every row has an own prompt of that length.
        tied: embeddings and output head are one matrix.
        vision: the tower of a model that sees (Qwen2.5-VL, whatever the family), and the picture of a prompt; None = text.
        options: of the patch.
        cases: what is measured: (`"lora"` or `"full"`, with gradient checkpointing).
        reference: whether gradients are also compared with those of an unpatched float32 run, where the precision is another
            and memory is not short: with gradient checkpointing.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    prompts: int
    completions: int
    micro_batch: int
    prompt_tokens: tuple[int, int]
    completion_median: int
    completion_spread: float
    completion_max: int
    spread: float = 0.04
    family: str = "llama"
    shared: bool = True
    tied: bool = True
    vision: Tower | None = None
    options: tuple[tuple[str, Any], ...] = ()
    cases: tuple[tuple[str, bool], ...] = (("lora", False), ("lora", True), ("full", False), ("full", True))
    reference: bool = False

    def config(self) -> transformers.PretrainedConfig:
        """Of the model."""
        settings = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": max(8192, self.prompt_tokens[1] + self.completion_max),
            "initializer_range": self.spread,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
        }
        if self.vision is not None:
            return self.vision.config(settings)
        kind = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[self.family]
        return kind(head_dim=128 if self.family == "qwen3" else None, **settings)


SMOLLM2 = Workload(
    "SmolLM2-135M",
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    intermediate=1536,
    vocabulary=49152,
    prompts=2,
    completions=4,
    micro_batch=8,
    prompt_tokens=(32, 80),
    completion_median=48,
    completion_spread=0.8,
    completion_max=128,
)
QWEN3_512 = Workload(
    "Qwen3-1.7B, prompts to 512",
    hidden=2048,
    layers=28,
    heads=16,
    kv_heads=8,
    intermediate=6144,
    vocabulary=151936,
    prompts=2,
    completions=8,
    micro_batch=16,
    prompt_tokens=(256, 512),
    completion_median=300,
    completion_spread=0.8,
    completion_max=1024,
    family="qwen3",
    cases=(("lora", True), ("lora", False), ("full", True)),
    reference=True,
)
_LORA = (("lora", True),)
# Without checkpointing, stock needs more memory here than there is.
QWEN3_2048 = replace(QWEN3_512, name="Qwen3-1.7B, prompts to 2048", prompt_tokens=(1536, 2048), cases=_LORA)
# TRL's shuffle scatters the completions of a prompt over the micro-batches.
QWEN3_BY_4, QWEN3_BY_2 = (
    replace(QWEN3_512, name=f"Qwen3-1.7B, micro-batches of {size}", micro_batch=size, cases=_LORA, reference=False)
    for size in (4, 2)
)
QWEN3_EQUAL = replace(
    QWEN3_512,
    name="Qwen3-1.7B, equal lengths, nothing shared",
    prompt_tokens=(512, 512),
    completion_median=512,
    completion_spread=0.0,
    completion_max=512,
    shared=False,
    cases=_LORA,
    reference=False,
)
# The text model of Qwen2-VL-2B under the vision tower of Qwen2.5-VL, whose gated layers get adapters too.
VISION = Workload(
    "vision, 2.2B, pictures of 1024 patches",
    hidden=1536,
    layers=28,
    heads=12,
    kv_heads=2,
    intermediate=8960,
    vocabulary=151936,
    prompts=2,
    completions=8,
    micro_batch=16,
    prompt_tokens=(384, 640),
    completion_median=300,
    completion_spread=0.8,
    completion_max=1024,
    spread=0.02,
    vision=Tower(layers=32, hidden=1280, heads=16, intermediate=3420, side=32),
    cases=_LORA,
    reference=True,
)
VISION_IN_PARTS = replace(VISION, name="vision, mini-batches of 4", options=(("mini_batch_size", 4),), reference=False)
# Stock TRL needs 109 GB with eight sequences in a micro-batch, and 27 GB with one.
LLAMA_LONG = Workload(
    "Llama-3.1-8B, 20480 tokens, offloaded",
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    intermediate=14336,
    vocabulary=128256,
    prompts=1,
    completions=8,
    micro_batch=8,
    prompt_tokens=(480, 480),
    completion_median=20_000,
    completion_spread=0.0,
    completion_max=20_000,
    spread=0.02,
    tied=False,
    cases=_LORA,
    options=(("mini_batch_size", 1), ("offload_activations", True)),
)
LLAMA_RECOMPUTED = replace(
    LLAMA_LONG, name="Llama-3.1-8B, 20480 tokens, mini-batches", options=(("mini_batch_size", 1),)
)
# As stock fits: one sequence a micro-batch. Two of the eight: the memory is that of one, the time that of two.
LLAMA_ONE = replace(
    LLAMA_LONG,
    name="Llama-3.1-8B, 20480 tokens, one a micro-batch",
    completions=2,
    micro_batch=1,
    options=(("offload_activations", True),),
)
# Short enough for a float32 run, whose attention keeps its scores.
LLAMA_SHORT = replace(
    LLAMA_ONE, name="Llama-3.1-8B, 2048 tokens", completion_median=1568, completion_max=1568, reference=True
)
# Minutes each, or beside the point of most runs, so only when they are asked for.
ASKED_FOR = (LLAMA_LONG, LLAMA_RECOMPUTED, LLAMA_ONE, LLAMA_SHORT, VISION_IN_PARTS)
WORKLOADS = {"cpu": (SMOLLM2,), "cuda": (QWEN3_512, QWEN3_2048, QWEN3_EQUAL, QWEN3_BY_4, QWEN3_BY_2, VISION)}
QUICK = Workload(
    "quick",
    hidden=32,
    layers=2,
    heads=2,
    kv_heads=1,
    intermediate=64,
    vocabulary=503,
    prompts=2,
    completions=2,
    micro_batch=2,
    prompt_tokens=(4, 12),
    completion_median=8,
    completion_spread=0.8,
    completion_max=24,
    reference=True,
)
QUICK_VISION = replace(
    QUICK,
    name="quick vision",
    prompt_tokens=(8, 12),
    vision=Tower(layers=2, hidden=32, heads=2, intermediate=64, side=4),
    cases=_LORA,
)
QUICK_VISION_IN_PARTS = replace(QUICK_VISION, name="quick vision in parts", options=(("mini_batch_size", 1),))
_COLUMNS = (
    "",
    "time / ours",
    "CPU time / ours",
    "memory / TRL's",
    "head's / TRL's",
    "extra MiB",
    "head's MiB",
    "|g - TRL's| / |g|",
    "|g - fp32's| / |g|",
    "median s (min-max)",
    "first s",
)


def run(
    device: torch.device,
    precision: str,
    train: list[str],
    old_pass: bool,
    rounds: int,
    quick: bool,
    only: list[str] | None = None,
) -> dict[str, Any]:
    """
    Measures the update with LoRA and in full, without and with gradient checkpointing, and prints the tables.

    Args:
        device: where to run.
        precision: `"float32"`, or `"bfloat16"` for autocast (TRL's own default).
        train: of `"lora"` (rank 16 on all linear layers) and `"full"`.
        old_pass: with the no-grad pass for old log-probs, as `num_iterations=2` needs it.
        rounds: see `interleave`.
        quick: a tiny model, to see that everything works.
        only: workloads whose name holds one of these; None = all.

    Returns:
        The run, see `report.record`.
    """
    report.quiet()
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    workloads = (QUICK,) if quick else WORKLOADS.get(device.type, (SMOLLM2,))
    if only:
        workloads += (QUICK_VISION, QUICK_VISION_IN_PARTS) if quick else ASKED_FOR
    shapes = []
    for workload in workloads:
        if only is not None and not any(text in workload.name for text in only):
            continue
        batch = synthetic_batch(workload, device)
        tokens = count_tokens(batch)
        shapes.append({"workload": asdict(workload), "tokens": tokens})
        report.say(
            f"{workload.name}, random weights, {precision}: {batch['prompt_ids'].shape[0]} sequences, padded to "
            f"{batch['prompt_ids'].shape[1]} + {batch['completion_ids'].shape[1]} tokens: {tokens['padded']} padded for "
            f"{tokens['real']} real ({tokens['padded'] / tokens['real']:.2f}x), {tokens['scored']} of them scored"
        )
        lines: list[dict[str, Any]] = []
        for kind, checkpointing in workload.cases:
            if kind not in train:
                continue
            name = f"{kind}, {'gradient' if checkpointing else 'no'} checkpointing"
            if old_pass:
                name += ", with old pass"
            stock, patched = _measure(workload, batch, device, precision, kind, checkpointing, old_pass, rounds)
            key = f"{workload.name}/{precision}/{name}"
            ratios[f"{key}/time: fastgrpo over TRL"] = 1 / stock["time_over_fastgrpo"]
            ratios[f"{key}/memory of the update: fastgrpo over TRL"] = patched["update_mib"] / stock["update_mib"]
            ratios[f"{key}/memory of the head: fastgrpo over TRL"] = patched["head_mib"] / stock["head_mib"]
            lines += [{"workload": workload.name, "case": name, **line} for line in (stock, patched)]
        title = f"One update: {'old pass, ' if old_pass else ''}loss forward and backward, {precision}"
        report.table(title, _COLUMNS, _cells(lines))
        rows += lines
    settings = {"shapes": shapes, "precision": precision, "old_pass": old_pass, "rounds": rounds}
    return report.record("update", device, settings, rows, ratios)


def synthetic_batch(workload: Workload, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """
    A generation batch as `GRPOTrainer` builds it: prompts left-padded, completions right-padded, random ids.

    Args:
        workload: sizes.
        device: where it lives.
        seed: of the lengths, the ids and the advantages.

    Returns:
        What `GRPOTrainer._generate_and_score_completions` returns.
    """
    generator = torch.Generator().manual_seed(seed)
    count = workload.prompts * workload.completions
    low, high = workload.prompt_tokens
    prompt_lengths = torch.linspace(low, high, workload.prompts).long().repeat_interleave(workload.completions)
    lengths = torch.randn(count, generator=generator).mul(workload.completion_spread).exp() * workload.completion_median
    lengths = lengths.round().long().clamp(4, workload.completion_max)
    prompt_width, width = int(prompt_lengths.max()), int(lengths.max())
    prompt_mask = (torch.arange(prompt_width) >= prompt_width - prompt_lengths.unsqueeze(1)).long()
    completion_mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
    last = workload.vocabulary - (RESERVED if workload.vision else 0)
    ids = torch.randint(2, last, (count, prompt_width + width), generator=generator)
    prompt_ids = ids[:, :prompt_width].view(workload.prompts, workload.completions, -1)[:, :1]
    prompt_ids = prompt_ids.expand(-1, workload.completions, -1).reshape(count, prompt_width)
    if not workload.shared:
        prompt_ids = ids[:, :prompt_width]
    batch = {
        "prompt_ids": prompt_ids * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": ids[:, prompt_width:] * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.randn(count, generator=generator),
        "num_items_in_batch": completion_mask.sum(),
    }
    if workload.vision:
        batch |= workload.vision.show(batch, workload.vocabulary, workload.completions, generator)
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def count_tokens(batch: dict[str, Any]) -> dict[str, int]:
    """Padded, real and scored tokens of a batch."""
    scored = int(batch["completion_mask"].sum())
    return {
        "padded": batch["prompt_ids"].numel() + batch["completion_ids"].numel(),
        "real": int(batch["prompt_mask"].sum()) + scored,
        "scored": scored,
    }


def build_trainer(
    workload: Workload,
    batch: dict[str, Any],
    device: torch.device,
    precision: str,
    kind: str,
    checkpointing: bool,
    old_pass: bool,
    output_dir: str,
) -> trl.GRPOTrainer:
    """
    A trainer whose generation returns `batch`; everything behind it is TRL's.

    Args:
        workload, batch, device: what to train on, and where.
        precision, kind, old_pass: see `run`.
        checkpointing: gradient checkpointing.
        output_dir: a folder that TRL wants.

    Returns:
        The trainer, not patched.
    """
    torch.manual_seed(0)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>")),
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
    )
    # TRL loads a base that is not trained in 16 bits; the adapters, and the model's rotary frequencies, stay in float32.
    frozen_in_16 = precision == "bfloat16" and device.type == "cuda" and kind == "lora"
    with device:
        auto = transformers.AutoModelForImageTextToText if workload.vision else transformers.AutoModelForCausalLM
        model = auto.from_config(workload.config(), dtype=torch.bfloat16 if frozen_in_16 else torch.float32)
    count = batch["prompt_ids"].shape[0]
    accumulation = count // workload.micro_batch
    arguments = trl.GRPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=workload.micro_batch,
        gradient_accumulation_steps=accumulation,
        num_generations=workload.completions,
        num_iterations=2 if old_pass else 1,
        max_completion_length=workload.completion_max,
        gradient_checkpointing=checkpointing,
        bf16=precision == "bfloat16",
        use_cpu=device.type == "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["<eos>"] * workload.prompts}),
        processing_class=Processor(tokenizer=tokenizer) if workload.vision else tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=LORA_LAYERS) if kind == "lora" else None,
    )
    if checkpointing:
        trainer.model.gradient_checkpointing_enable(arguments.gradient_checkpointing_kwargs)
    if kind == "lora":
        _start_adapters(trainer.model)
    trainer.current_gradient_accumulation_steps = accumulation
    trainer._generate_and_score_completions = lambda _: _with_old_logprobs(trainer, batch) if old_pass else dict(batch)
    return trainer


def one_update(trainer: trl.GRPOTrainer) -> float:
    """
    The micro-batches of one optimizer step through `GRPOTrainer.training_step`; gradients stay in the parameters.

    Args:
        trainer: from `build_trainer`, patched or not.

    Returns:
        The loss.
    """
    trainer.model.zero_grad(set_to_none=True)
    trainer._step, trainer._buffered_inputs = 0, None
    trainer.state.global_step += 1  # as every optimizer step does
    torch.manual_seed(0)  # TRL shuffles the batch
    steps = range(trainer.current_gradient_accumulation_steps)
    return sum(float(trainer.training_step(trainer.model, {}, None)) for _ in steps)


def _with_old_logprobs(trainer: trl.GRPOTrainer, batch: dict[str, Any]) -> dict[str, Tensor]:
    # What TRL does there: in evaluation of gradients, in micro-batches, checkpointing off.
    from trl.trainer import grpo_trainer

    with (
        torch.no_grad(),
        grpo_trainer.disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs),
    ):
        old, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
            batch["completion_ids"].shape[1],
            batch_size=trainer.args.per_device_train_batch_size,
            **{name: batch[name] for name in INPUTS if name in batch},
        )
    return batch | {"old_per_token_logps": old}


def _start_adapters(model: torch.nn.Module) -> None:
    # LoRA starts with B = 0, where A has no gradient to compare.
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            value = torch.randn(parameter.shape, generator=generator) * 0.01
            parameter.data.copy_(value.to(parameter.device, parameter.dtype))


def _measure(
    workload: Workload,
    batch: dict[str, Any],
    device: torch.device,
    precision: str,
    kind: str,
    checkpointing: bool,
    old_pass: bool,
    rounds: int,
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        # Two trainers, built alike: patching one anew for every call would time the check at patch time too.
        trainers = {
            name: build_trainer(workload, batch, device, precision, kind, checkpointing, old_pass, folder)
            for name in (STOCK, PATCHED)
        }
        started = time.perf_counter()
        fastgrpo.patch(trainers[PATCHED], fastgrpo.Options(**dict(workload.options)))
        patch_seconds = time.perf_counter() - started
        runs: dict[str, Callable[[], float]] = {
            name: lambda trainer=trainer: one_update(trainer) for name, trainer in trainers.items()
        }
        lines: dict[str, dict[str, Any]] = {}
        gradients: dict[str, list[Tensor]] = {}
        # Patched first: in a fresh process its first update has nothing warmed up for it.
        for name, update in reversed(runs.items()):
            losses: list[float] = []
            seconds: list[float] = []

            def first(update=update, losses=losses, seconds=seconds) -> None:
                started = time.perf_counter()
                losses.append(update())  # a number, for which the device has been waited
                seconds.append(time.perf_counter() - started)

            # The call that counts memory is also the warm-up.
            update_bytes = extra_peak_bytes(first, device)
            gradients[name] = _gradients(trainers[name])
            lines[name] = {
                "path": name,
                "loss": losses[0],
                "update_mib": update_bytes / MIB,
                # On a CPU it ran under the profiler that counts memory.
                "first_seconds": seconds[0] if device.type == "cuda" else None,
            }
        lines[PATCHED]["patch_seconds"] = patch_seconds
        if workload.reference and checkpointing and precision != "float32":
            exact = build_trainer(workload, batch, device, "float32", kind, checkpointing, old_pass, folder)
            with torch.no_grad():
                for to, of in zip(exact.model.parameters(), trainers[STOCK].model.parameters(), strict=True):
                    to.copy_(of)
            one_update(exact)
            reference = _gradients(exact)
            del exact
            for name, found in gradients.items():
                lines[name]["grad_error"] = _distance(found, reference)
            del reference
        problem = _head_problem(trainers[PATCHED], batch, precision)
        task = "frozen" if kind == "lora" else "trained"
        for name, peer in zip((PATCHED, STOCK), peers(torch.float32), strict=False):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                lines[name]["head_mib"] = extra_peak_bytes(lambda peer=peer: peer.run(problem, task), device) / MIB
        difference = _distance(gradients[PATCHED], gradients[STOCK])
        gradients.clear()
        timings = interleave(runs, rounds, 0, device)
        for name, timing in timings.items():
            lines[name] |= {
                "seconds": timing.seconds,
                "cpu_seconds": timing.cpu_seconds,
                "time_over_fastgrpo": timing.over(timings[PATCHED]),
                "cpu_time_over_fastgrpo": timing.cpu_over(timings[PATCHED]),
                "grad_difference": difference,
            }
        fastgrpo.unpatch(trainers[PATCHED])
    return [lines[STOCK], lines[PATCHED]]


def _gradients(trainer: trl.GRPOTrainer) -> list[Tensor]:
    """Those an update has left, taken off the parameters."""
    found = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    trainer.model.zero_grad(set_to_none=True)
    return found


def _distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Relative to what is expected, of all gradients together."""
    difference = sum((a.double() - b.double()).square().sum() for a, b in zip(found, expected, strict=True))
    return float((difference / sum(b.double().square().sum() for b in expected)).sqrt())


def _head_problem(trainer: trl.GRPOTrainer, batch: dict[str, Any], precision: str) -> Problem:
    # The head's share of the first micro-batch: TRL's sees every position, fastgrpo's the scored ones.
    rows = trainer.args.per_device_train_batch_size
    weight = trainer.accelerator.unwrap_model(trainer.model).get_output_embeddings().weight.detach()
    mask = torch.cat([torch.zeros_like(batch["prompt_mask"]), batch["completion_mask"]], 1)[:rows, 1:]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)[:rows, 1:]
    hidden = torch.randn(*ids.shape, weight.shape[1], device=weight.device)
    targets = ids.masked_fill(mask == 0, -100)
    return Problem(hidden.to(getattr(torch, precision)), weight, targets, batch["advantages"][:rows])


def _cells(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    for stock, patched in zip(rows[::2], rows[1::2], strict=True):
        yield [patched["case"], *[""] * (len(_COLUMNS) - 1)]
        for line in (stock, patched):
            cpu_ratio = line["cpu_time_over_fastgrpo"]
            yield [
                f"  {line['path']}",
                f"{line['time_over_fastgrpo']:.2f}",
                "" if cpu_ratio is None else f"{cpu_ratio:.2f}",
                f"{line['update_mib'] / stock['update_mib']:.2f}",
                f"{line['head_mib'] / stock['head_mib']:.2f}",
                f"{line['update_mib']:.0f}",
                f"{line['head_mib']:.0f}",
                "" if line is stock else f"{line['grad_difference']:.1e}",
                f"{line['grad_error']:.1e}" if "grad_error" in line else "",
                str(Timing(line["seconds"])),
                "" if line["first_seconds"] is None else f"{line['first_seconds']:.2f}",
            ]
        yield []
