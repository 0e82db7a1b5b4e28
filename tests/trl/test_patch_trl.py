"""Claims about `patch_trl`, `unpatch_trl` and the classes they exchange."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import functools
import inspect
import pickle
import sys
import types
from abc import ABC
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
import torch
import trl
import trl.trainer.grpo_config as trl_config
import trl.trainer.grpo_trainer as trl_trainer
from tiny import tiny_model, tiny_trainer
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import GRPOConfig, GRPOTrainer, TrlParser

import fastgrpo
from fastgrpo.trl import classes, names
from fastgrpo.trl.patch import find_patch
from fastgrpo.trl.twins import option_helps

# Under these names the sweep of modules does not find them.
STOCK = types.SimpleNamespace(config=GRPOConfig, trainer=GRPOTrainer)


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    for variable in ("FASTGRPO_FORCE_FLOAT32", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(variable, raising=False)
    yield
    fastgrpo.unpatch_trl()
    assert trl.GRPOConfig is STOCK.config and trl.GRPOTrainer is STOCK.trainer


@pytest.fixture
def patched_trl():
    fastgrpo.patch_trl()


def holders() -> dict[str, types.ModuleType]:
    return {"trl": trl, "trl.trainer": trl.trainer, "config": trl_config, "trainer": trl_trainer, "tiny": tiny}


def test_the_names_become_subclasses_everywhere_and_unpatch_trl_restores_everything():
    before = {name: dict(vars(module)) for name, module in holders().items()}
    dispatch = dict(copyreg.dispatch_table)
    fastgrpo.patch_trl()
    for module in holders().values():
        for name, stock in (("GRPOConfig", STOCK.config), ("GRPOTrainer", STOCK.trainer)):
            ours = getattr(module, name, None)
            if ours is not None:
                assert ours is not stock and issubclass(ours, stock) and ours.__name__ == name
    assert GRPOConfig is trl.GRPOConfig and tiny.GRPOTrainer is trl.GRPOTrainer  # imported before
    fastgrpo.patch_trl()  # a second time changes nothing
    fastgrpo.unpatch_trl()
    assert {name: dict(vars(module)) for name, module in holders().items()} == before
    assert copyreg.dispatch_table == dispatch
    fastgrpo.unpatch_trl()


def test_a_name_imported_in_between_and_another_name_for_it_are_restored_too():
    module = types.ModuleType("script_of_a_user")
    module.Trainer = STOCK.trainer
    sys.modules[module.__name__] = module
    try:
        fastgrpo.patch_trl()
        assert module.Trainer is trl.GRPOTrainer
        module.Later = trl.GRPOConfig
        fastgrpo.unpatch_trl()
        assert module.Trainer is STOCK.trainer and module.Later is STOCK.config
    finally:
        del sys.modules[module.__name__]


def test_modules_that_cannot_be_changed_are_named():
    class Frozen(types.ModuleType):
        def __setattr__(self, name, value):
            raise AttributeError("read only")

    frozen, registry = Frozen("frozen_module"), types.ModuleType("module_with_registry")
    frozen.__dict__["GRPOTrainer"] = STOCK.trainer
    registry.GRPOTrainer, registry.TRAINERS = STOCK.trainer, {"grpo": STOCK.trainer}
    registry.make = functools.partial(STOCK.trainer, reward_funcs=tiny.many_letters)
    sys.modules |= {"frozen_module": frozen, "module_with_registry": registry}
    try:
        with pytest.warns(
            UserWarning, match=r"frozen_module\.GRPOTrainer, module_with_registry\.TRAINERS, module_with_registry\.make"
        ):
            fastgrpo.patch_trl()
        assert frozen.GRPOTrainer is STOCK.trainer and registry.GRPOTrainer is trl.GRPOTrainer
    finally:
        del sys.modules["frozen_module"], sys.modules["module_with_registry"]


def test_a_second_call_finds_what_got_hold_of_trls_classes_since(patched_trl):
    module = types.ModuleType("late")
    sys.modules["late"] = module
    try:
        module.Trainer = STOCK.trainer
        fastgrpo.patch_trl()
        assert module.Trainer is trl.GRPOTrainer
        fastgrpo.unpatch_trl()
        assert module.Trainer is STOCK.trainer
    finally:
        del sys.modules["late"]


def test_checkpoints_resume_with_and_without_the_patch(tmp_path, patched_trl):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "lora": False}
    trainer = tiny_trainer(tmp_path, **saving)
    trainer.train()
    fastgrpo.unpatch_trl()
    stock = tiny_trainer(tmp_path, **saving)
    stock.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    fastgrpo.patch_trl()
    again = tiny_trainer(tmp_path, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for other in (stock, again):
        assert other.state.global_step == 2
        for ours, theirs in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_class_attributes_and_default_arguments_of_a_module_are_replaced():
    module = types.ModuleType("framework")
    source = (
        "from trl import GRPOConfig, GRPOTrainer\n"
        "class Recipe:\n"
        "    trainer_class = GRPOTrainer\n"
        "    def build(self, cls=GRPOTrainer): return cls\n"
        "def make(n, cls=GRPOTrainer, *, config=GRPOConfig): return cls, config\n"
    )
    sys.modules["framework"] = module
    try:
        exec(source, vars(module))
        defaults = module.make.__defaults__
        fastgrpo.patch_trl()
        assert {module.Recipe.trainer_class, module.Recipe().build()} == {trl.GRPOTrainer}
        assert module.make(1) == (trl.GRPOTrainer, trl.GRPOConfig)
        fastgrpo.unpatch_trl()
        assert {module.Recipe.trainer_class, module.Recipe().build()} == {STOCK.trainer}
        assert module.make(1) == (STOCK.trainer, STOCK.config) and module.make.__defaults__ is defaults
    finally:
        del sys.modules["framework"]


def test_unpatching_a_trainer_while_the_next_ones_arguments_are_made(tmp_path):
    first, second = tiny_trainer(tmp_path), tiny_trainer(tmp_path)
    handles = [fastgrpo.patch(first), fastgrpo.patch(second)]
    GRPOConfig(str(tmp_path), bf16=False)
    for handle in handles:
        handle.unpatch()


def test_what_someone_else_put_there_since_is_left_with_a_warning(monkeypatch, patched_trl):
    class Other(trl.GRPOTrainer):
        pass

    monkeypatch.setattr(trl_trainer, "GRPOTrainer", Other)
    with pytest.warns(UserWarning, match=r"trl\.trainer\.grpo_trainer\.GRPOTrainer was replaced by something else"):
        fastgrpo.unpatch_trl()
    assert trl_trainer.GRPOTrainer is Other
    trl_trainer.GRPOTrainer = STOCK.trainer
    monkeypatch.undo()
    trl_trainer.GRPOTrainer = STOCK.trainer


def test_a_config_class_defined_before_is_an_error_that_names_it_and_changes_nothing():
    @dataclass
    class MyConfig(STOCK.config):
        mine: int = 1

    with pytest.raises(TypeError, match=r"MyConfig was derived from TRL's GRPOConfig before"):
        fastgrpo.patch_trl()
    assert trl.GRPOConfig is STOCK.config and trl.GRPOTrainer is STOCK.trainer
    del MyConfig
    fastgrpo.patch_trl()  # a class that nobody holds any more is not in the way


def test_a_wrong_argument_is_an_error():
    with pytest.raises(TypeError, match="tuned_defaults is 'no'; give True or False"):
        fastgrpo.patch_trl("no")


def test_the_api_is_trls(patched_trl):
    assert inspect.signature(trl.GRPOTrainer.__init__) == inspect.signature(STOCK.trainer.__init__)
    stock, ours = (list(inspect.signature(cls).parameters) for cls in (STOCK.config, trl.GRPOConfig))
    assert ours[: len(stock)] == stock
    for field in dataclasses.fields(STOCK.config):
        if field.name != "fp16":
            assert trl.GRPOConfig.__dataclass_fields__[field.name].default == field.default
    with pytest.raises(TypeError, match=r"GRPOTrainer\.__init__\(\) missing"):
        trl.GRPOTrainer()


def test_every_option_has_a_twin_with_its_default_and_a_help_text(patched_trl):
    twins = {name: field for name, field in trl.GRPOConfig.__dataclass_fields__.items() if name.startswith("fastgrpo_")}
    twins.pop("fastgrpo_tuned_defaults")
    options = dataclasses.fields(fastgrpo.Options)
    assert set(twins) == {f"fastgrpo_{option.name}" for option in options}
    for option in options:
        twin = twins[f"fastgrpo_{option.name}"]
        assert twin.default == option.default
        text = option_helps()[option.name]
        assert len(text) > 20 and twin.metadata["help"][1:] == text[1:].replace("%", "%%")


def test_a_bad_value_of_a_twin_is_an_error_before_anything_is_loaded(tmp_path, patched_trl):
    with pytest.raises(ValueError, match=r"packing is 'dense'; choose one of .*start with fastgrpo_"):
        trl.GRPOConfig(str(tmp_path), fastgrpo_packing="dense")


def test_a_value_of_the_wrong_type_names_the_twin_too(tmp_path, patched_trl):
    with pytest.raises(TypeError, match=r"chunk_bytes is 'much'; .*start with fastgrpo_"):
        trl.GRPOConfig(str(tmp_path), fastgrpo_chunk_bytes="much")


SWITCHES = [field.name for field in dataclasses.fields(fastgrpo.Options) if field.type == "bool"]


@pytest.mark.parametrize("value", ["False", "no", 0, 1, 1.0, None])
def test_a_switch_is_true_or_false(value, tmp_path, patched_trl):
    assert len(SWITCHES) >= 4
    for name in SWITCHES:
        with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be True or False"):
            fastgrpo.Options(**{name: value})
        with pytest.raises(ValueError, match=rf"{name} is {value!r}; it must be True or False.*start with fastgrpo_"):
            trl.GRPOConfig(str(tmp_path), **{f"fastgrpo_{name}": value})
    if value is None:  # what patch_trl said
        assert trl.GRPOConfig(str(tmp_path), fastgrpo_tuned_defaults=None).fastgrpo_tuned_defaults is True
        return
    with pytest.raises(ValueError, match=f"fastgrpo_tuned_defaults is {value!r}; it must be True or False"):
        trl.GRPOConfig(str(tmp_path), fastgrpo_tuned_defaults=value)


def of_command_line(tmp_path, value):
    (config,) = HfArgumentParser(trl.GRPOConfig).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--fastgrpo_run_log", value]
    )
    return config.fastgrpo_run_log


@pytest.mark.parametrize(
    ("text", "read"),
    [
        *(("0", False), ("no", False), ("FALSE", False), ("f", False), ("1", True), ("yes", True), ("true", True)),
        *((path, path) for path in ("logs", "./0", "2024-01", "..")),
    ],
)
def test_a_switch_that_can_be_a_path_reads_the_words_of_a_command_line(text, read, tmp_path, patched_trl):
    assert (
        of_command_line(tmp_path, text) == trl.GRPOConfig(str(tmp_path), fastgrpo_run_log=text).fastgrpo_run_log == read
    )
    assert type(of_command_line(tmp_path, text)) is type(read)
    if read is True or read is False:
        with pytest.raises(ValueError, match=f"run_log is {text!r}; give a path, True or False"):
            fastgrpo.Options(run_log=text)


@pytest.mark.parametrize("text", ["2", "-1", "0.0", "none", "null", "off", "on", " ", ""])
def test_neither_a_switch_nor_a_path_is_refused_everywhere(text, tmp_path, patched_trl):
    for call in (
        lambda: fastgrpo.Options(run_log=text),
        lambda: trl.GRPOConfig(str(tmp_path), fastgrpo_run_log=text),
        lambda: of_command_line(tmp_path, text),
    ):
        with pytest.raises(ValueError, match=f"run_log is {text!r}; give a path, True or False"):
            call()


def test_a_path_named_as_a_switch_stays_a_path(tmp_path, patched_trl):
    config = trl.GRPOConfig(str(tmp_path), fastgrpo_run_log=Path("0"))
    again = trl.GRPOConfig(**config.to_dict() | {"generation_batch_size": None})
    assert config.fastgrpo_run_log == again.fastgrpo_run_log == "./0"


def test_a_built_trainer_is_patched_with_the_options_of_its_config(tmp_path, patched_trl):
    trainer = tiny_trainer(
        tmp_path, max_steps=1, fastgrpo_packing="left", fastgrpo_num_chunks=2, fastgrpo_run_log=False
    )
    assert type(trainer) is trl.GRPOTrainer and isinstance(trainer, STOCK.trainer)
    assert find_patch(trainer).options == fastgrpo.Options(packing="left", num_chunks=2, run_log=False)
    trainer.train()
    assert trainer.state.global_step == 1
    fastgrpo.unpatch(trainer)
    assert find_patch(trainer) is None


def test_a_patched_run_is_that_of_patch(tmp_path):
    losses = []
    for through_trl in (False, True):
        if through_trl:
            fastgrpo.patch_trl(tuned_defaults=False)
        trainer = tiny_trainer(tmp_path / str(through_trl), max_steps=2)
        fastgrpo.patch(trainer)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[0] == losses[1]


def test_a_refused_trainer_says_the_way_out(tmp_path, patched_trl):
    class Hooked(trl.GRPOTrainer):
        def create_accelerator_and_postprocess(self):  # while the trainer is built
            super().create_accelerator_and_postprocess()
            self._get_per_token_logps_and_entropies = lambda *args, **kwargs: None

    with pytest.raises(fastgrpo.UnsupportedError, match=r"set on the object.*call fastgrpo\.unpatch_trl\(\) before"):
        tiny_trainer(tmp_path, trainer_class=Hooked)


def test_a_trainer_class_defined_before_makes_patched_trainers(tmp_path, caplog):
    class Mine(STOCK.trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.mine = True

    fastgrpo.patch_trl()
    assert "Mine, defined earlier, is a subclass of the patched GRPOTrainer now" in caplog.text
    trainer = tiny_trainer(tmp_path, trainer_class=Mine)
    assert trainer.mine and find_patch(trainer) is not None
    fastgrpo.unpatch(trainer)
    fastgrpo.unpatch_trl()
    assert Mine.__bases__ == (STOCK.trainer,)
    assert find_patch(tiny_trainer(tmp_path, trainer_class=Mine)) is None


def test_classes_defined_in_between_work_and_behave_as_trls_afterwards(tmp_path, patched_trl):
    @dataclass
    class MyConfig(trl.GRPOConfig):
        mine: int = 1
        beta: float = 0.04

        def __post_init__(self):
            super().__post_init__()
            self.mine += 1

    class Mine(ABC, trl.GRPOTrainer):  # a metaclass of its own
        pass

    config = MyConfig(str(tmp_path), bf16=False, report_to="none")
    assert (config.mine, config.beta, config.fastgrpo_packing) == (2, 0.04, "auto")
    assert copy.deepcopy(config) == config and type(copy.copy(config)) is MyConfig
    trainer = tiny_trainer(tmp_path, trainer_class=Mine)
    assert find_patch(trainer) is not None
    fastgrpo.unpatch(trainer)
    fastgrpo.unpatch_trl()
    later = MyConfig(str(tmp_path), bf16=False)
    assert (later.fp16, later.mixed_precision) == (False, "no")
    assert find_patch(tiny_trainer(tmp_path, trainer_class=Mine)) is None


def test_objects_made_before_still_are_instances_and_can_be_trained_with(tmp_path, caplog):
    config = STOCK.config(str(tmp_path), bf16=False, use_cpu=True, report_to="none", max_steps=1, save_strategy="no")
    trainer = tiny_trainer(tmp_path)
    fastgrpo.patch_trl()
    assert isinstance(config, trl.GRPOConfig) and isinstance(trainer, trl.GRPOTrainer)
    assert issubclass(STOCK.trainer, trl.GRPOTrainer) and not isinstance(config, trl.GRPOTrainer)
    assert pickle.loads(pickle.dumps(config)).max_steps == 1  # as checkpoints do
    assert type(copy.copy(config)) is STOCK.config
    late = trl.GRPOTrainer(
        tiny_model(),
        reward_funcs=tiny.many_letters,
        args=config,
        train_dataset=trainer.train_dataset,
        processing_class=tiny.tiny_tokenizer(),
    )
    assert late.args is config and config.beta == 0.0
    assert find_patch(late) is not None
    assert "args were made before" in caplog.text


def test_a_pickled_config_loads_with_and_without_the_patch(tmp_path, patched_trl):
    config = trl.GRPOConfig(str(tmp_path), fastgrpo_packing="left", max_steps=7)
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        text = pickle.dumps(config, protocol)
        assert b"fastgrpo." not in text  # loads where fastgrpo is not installed
        again = pickle.loads(text)
        assert type(again) is trl.GRPOConfig and again == config and vars(again).keys() == vars(config).keys()
    torch.save(config, tmp_path / "training_args.bin")
    fastgrpo.unpatch_trl()
    stock = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert type(stock) is STOCK.config and stock.max_steps == 7
    assert (
        pickle.dumps(config, pickle.HIGHEST_PROTOCOL) == text
    )  # a trainer that outlives the patch can save its checkpoints


def test_copies_dicts_and_json_keep_the_twins(tmp_path, patched_trl):
    config = trl.GRPOConfig(str(tmp_path), fastgrpo_run_log=tmp_path / "here.jsonl", fastgrpo_share_prefix=False)
    for again in (copy.copy(config), copy.deepcopy(config)):
        assert type(again) is trl.GRPOConfig and again == config
    values = config.to_dict()
    assert (
        values["fastgrpo_run_log"] == str(tmp_path / "here.jsonl")
        and '"fastgrpo_share_prefix": false' in config.to_json_string()
    )
    rebuilt = trl.GRPOConfig(**values | {"generation_batch_size": None})
    assert rebuilt.to_dict() == values
    assert dataclasses.replace(config, generation_batch_size=None, max_steps=3).fastgrpo_share_prefix is False


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_twins_are_read_from_a_command_line(parser, tmp_path, patched_trl):
    def parse(*arguments):
        (config,) = parser(trl.GRPOConfig).parse_args_into_dataclasses(["--output_dir", str(tmp_path), *arguments])
        return classes.options_of(config), config

    options, config = parse()
    assert options == fastgrpo.Options() and config.vllm_sampling_params is None
    options, config = parse(
        *("--fastgrpo_chunk_bytes", "1000000", "--fastgrpo_logit_chunk_multiplier", "2", "--fastgrpo_packing", "left"),
        *("--fastgrpo_share_prefix", "false", "--fastgrpo_skip_zero_advantage", "--fastgrpo_run_log", "False"),
    )
    assert options == fastgrpo.Options(
        chunk_bytes=1000000,
        logit_chunk_multiplier=2.0,
        packing="left",
        share_prefix=False,
        skip_zero_advantage=True,
        run_log=False,
    )
    assert parse("--fastgrpo_run_log", "logs/a.jsonl")[0].run_log == "logs/a.jsonl"
    assert parse("--fastgrpo_tuned_defaults", "false")[1].fastgrpo_tuned_defaults is False
    _, config = parse("--use_vllm", "--vllm_sampling_params", '{"temperature": 0.7, "seed": 3}')
    assert (config.temperature, config.generation_kwargs) == (0.7, {"seed": 3})
    parser(trl.GRPOConfig).format_help()


def test_a_yaml_file_sets_twins(tmp_path, patched_trl):
    (tmp_path / "run.yaml").write_text(f"output_dir: {tmp_path}\nfastgrpo_run_log: false\nbeta: 0.0\n")
    (config,) = TrlParser(trl.GRPOConfig).parse_args_and_config(["--config", str(tmp_path / "run.yaml")])
    assert config.fastgrpo_run_log is False and config.beta == 0.0


def test_precision_follows_device_environment_and_arguments(tmp_path, patched_trl, monkeypatch):
    def precision(**given):
        config = trl.GRPOConfig(str(tmp_path), use_cpu=True, **given)
        assert (config.bf16, config.fp16) == (config.mixed_precision == "bf16", config.mixed_precision == "fp16")
        return config.mixed_precision

    assert precision() == "no" and precision(bf16=True) == "bf16"  # TRL's default is bf16 on a CPU too
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert precision() == "bf16" and precision(bf16=False) == "no"
    monkeypatch.setenv("FASTGRPO_FORCE_FLOAT32", "1")
    assert precision() == precision(bf16=True, bf16_full_eval=True) == "no"
    monkeypatch.setenv("FASTGRPO_FORCE_FLOAT32", "yes")
    with pytest.raises(ValueError, match="FASTGRPO_FORCE_FLOAT32 is 'yes'"):
        precision()
    fastgrpo.unpatch_trl()
    assert precision(bf16=None) == "bf16"  # TRL's again: nothing is read


def test_every_forward_runs_in_the_chosen_precision(tmp_path, patched_trl):
    tiny_model().save_pretrained(tmp_path / "model")
    seen: dict[str, set[bool]] = {}

    class Watched(trl.GRPOTrainer):
        def _generate(self, *args, **kwargs):
            with watching("generation"):
                return super()._generate(*args, **kwargs)

        def _compute_loss(self, *args, **kwargs):
            with watching("loss"):
                return super()._compute_loss(*args, **kwargs)

    class watching:
        stage = "old and reference"

        def __init__(self, name):
            self.name = name

        def __enter__(self):
            watching.stage = self.name

        def __exit__(self, *_):
            watching.stage = "old and reference"

    trainer = tiny_trainer(
        tmp_path,
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        lora=False,
        trainer_class=Watched,
        bf16=True,
        max_steps=1,
        steps_per_generation=4,
    )
    assert trainer.beta == 0.001 and trainer.ref_model is not None
    for model in (trainer.model, trainer.ref_model):
        model.get_input_embeddings().register_forward_hook(
            lambda *_: seen.setdefault(watching.stage, set()).add(torch.is_autocast_enabled("cpu"))
        )
    trainer.train()
    assert seen == {"generation": {True}, "old and reference": {True}, "loss": {True}}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_forced_float32_makes_the_weights_float32(tmp_path, monkeypatch, patched_trl):
    monkeypatch.setenv("FASTGRPO_FORCE_FLOAT32", "1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = tiny_trainer(tmp_path, tiny_model().bfloat16(), lora=False, bf16=True)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert trainer.accelerator.mixed_precision == "no"
    tiny_model().bfloat16().save_pretrained(tmp_path / "model")
    given = {
        "model": str(tmp_path / "model"),
        "args": trl.GRPOConfig(str(tmp_path), model_init_kwargs={"dtype": "bfloat16"}),
    }
    trainer = trl.GRPOTrainer(
        **given,
        reward_funcs=tiny.many_letters,
        train_dataset=trainer.train_dataset,
        processing_class=tiny.tiny_tokenizer(),
    )
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    quantised = tiny_model()
    quantised.is_quantized = True
    with pytest.raises(ValueError, match="FASTGRPO_FORCE_FLOAT32=1 was set, and the model is quantised"):
        tiny_trainer(tmp_path, quantised)


def test_a_precision_that_deepspeed_would_not_hear_of_is_an_error(patched_trl):
    config = types.SimpleNamespace(mixed_precision="bf16", deepspeed_plugin=object())
    trl.GRPOConfig._settle_autocast(config, "bf16")
    with pytest.raises(
        ValueError, match=r"ACCELERATE_MIXED_PRECISION=bf16 reaches DeepSpeed.*set the variable to 'no'"
    ):
        trl.GRPOConfig._settle_autocast(config, "no")


def test_fp16_raises_trained_16_bit_weights_to_float32(tmp_path, capsys, patched_trl):
    trainer = tiny_trainer(tmp_path, tiny_model().half(), lora=False, fp16=True, bf16=None)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert "fp16 needs that" in capsys.readouterr().err
    trainer = tiny_trainer(tmp_path, tiny_model().half(), fp16=True, bf16=None)
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    assert torch.float16 in {p.dtype for p in trainer.model.parameters()}


def test_weights_that_continuous_batching_would_cast_for_good(tmp_path, caplog, patched_trl):
    pytest.importorskip("transformers", minversion="5.8")
    tiny_trainer(tmp_path, use_transformers_continuous_batching=True, bf16=True)
    assert "cast the float32 weights to 16 bit at the first generation, for good" in caplog.text
    caplog.clear()
    tiny_trainer(tmp_path, use_transformers_continuous_batching=True, bf16=False)
    assert "for good" not in caplog.text
    with pytest.raises(ValueError, match="a gradient scaler refuses such gradients"):
        tiny_trainer(tmp_path, use_transformers_continuous_batching=True, bf16=None, fp16=True)


def test_patch_leaves_the_precision_of_a_built_trainer(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, bf16=True)
    monkeypatch.setenv("FASTGRPO_FORCE_FLOAT32", "1")
    with fastgrpo.patch(trainer):
        assert trainer.args.bf16 and trainer.accelerator.mixed_precision == "bf16"


def test_importing_fastgrpo_auto_patches(monkeypatch):
    monkeypatch.delitem(sys.modules, "fastgrpo.auto", raising=False)
    import fastgrpo.auto  # noqa: F401

    assert trl.GRPOTrainer is classes.GRPOTrainer and names._replaced
