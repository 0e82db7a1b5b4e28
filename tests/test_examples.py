"""Claims about examples/: each runs, at a tiny size, on a CPU, offline."""

from __future__ import annotations

import random
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fastgrpo

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ["--tiny", "--max_steps", "2", "--report_to", "none"]

pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not part of an installed package")


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Loads an example as an import would, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "fastgrpo.auto", raising=False)
    yield lambda name: SimpleNamespace(**runpy.run_path(str(EXAMPLES / name)))
    fastgrpo.unpatch_trl()
    for handle in list(sys.modules["fastgrpo.trl.patch"]._active):
        handle.unpatch()


def steps(trainer: Any) -> list[dict[str, float]]:
    return [line for line in trainer.state.log_history if "reward" in line]


def test_every_example_is_run_by_a_test():
    tests = Path(__file__).read_text() + (Path(__file__).parent / "tools" / "test_example.py").read_text()
    for script in EXAMPLES.glob("*.py"):
        assert script.name == "offline.py" or script.name in tests


def test_word_problems(example):
    script = example("grpo_gsm8k_like.py")
    problems = [script.problem(random.Random(seed)) for seed in range(50)]
    for problem in problems:
        have, bags, each, *gone = map(int, re.findall(r"\d+", problem["prompt"]))
        assert int(problem["answer"]) == have + bags * each - sum(gone) > 0
    trainer = script.main([*TINY, "--max_completion_length", "12", "--problems", "4", "--fastgrpo_packing", "left"])
    assert len(steps(trainer)) == 2
    assert Path("grpo_gsm8k_like/log.jsonl").exists()
    assert script.correct(["so #### 1,204", "#### 7", "1204"], ["1204", "8", "1204"]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["grpo_gsm8k_like.py", "vision_language.py", "vllm_colocate.py"])
def test_a_toy_is_trained_for_few_steps_where_nobody_says(example, name, monkeypatch):
    """The trainer is never built."""
    import trl

    script, asked = example(name), []

    def instead(trainer, *args, **kwargs):
        asked.append(kwargs["args"].max_steps)
        raise KeyboardInterrupt

    monkeypatch.setattr(trl.GRPOTrainer, "__init__", instead)
    for arguments in (["--tiny"], ["--tiny", "--max_steps", "7"]):
        with pytest.raises(KeyboardInterrupt):
            script.main([*arguments, "--report_to", "none"])
    assert asked == [20, 7]


def test_pictures(example):
    trainer = example("vision_language.py").main([*TINY, "--max_completion_length", "6", "--pictures", "4"])
    assert len(steps(trainer)) == 2 and trainer.model.config.model_type == "qwen2_5_vl"


def test_vllm_colocate_with_a_stand_in_for_the_engine(example):
    from sampler import fake_vllm

    script = example("vllm_colocate.py")
    _, config = script.parse([])
    assert (config.use_vllm, config.vllm_mode, config.temperature, config.top_k) == (True, "colocate", 0.9, -1)
    assert config.generation_kwargs == {"min_p": 0.02, "repetition_penalty": 1.0}
    with fake_vllm() as engines:
        trainer = script.main([*TINY, "--max_completion_length", "8", "--fastgrpo_sync", "trl"])
    assert len(steps(trainer)) == 2
    (engine,) = engines
    assert (engine.temperature, engine.mode, engine.generation_kwargs["min_p"]) == (0.9, "colocate", 0.02)


def test_a_loop_of_ones_own_raises_its_reward_without_trl(example):
    assert "trl" not in re.findall(r"^(?:from|import) (\w+)", (EXAMPLES / "own_loop.py").read_text(), re.MULTILINE)
    with pytest.raises(SystemExit):
        example("own_loop.py").main(["--group", "1"])
    history = example("own_loop.py").main(["--steps", "40"])
    assert sum(history[-10:]) > sum(history[:10]) + 0.5
