"""What a training start says."""

from __future__ import annotations

import re

from tiny import many_letters, tiny_trainer

import fastgrpo
from fastgrpo.trl.start import StartLines, start_lines


def test_a_line_for_each_layer_is_printed_when_training_starts_and_not_after_unpatching(tmp_path, capsys):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    with fastgrpo.patch(trainer):
        assert "fastgrpo |" not in capsys.readouterr().err
        trainer.train()
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fastgrpo | ")]
    layers = [re.match(r"fastgrpo \| (\w+): ", line)[1] for line in lines]
    assert layers == ["device", "trained", "head", "rewards", "rollouts"]
    assert re.search(r"device: cpu .*weights in float32; fastgrpo .*, trl .*, transformers .*, torch ", lines[0])
    assert re.search(r"4\.1 k of 26\.6 k parameters \(LORA 'default'\), output head frozen", lines[1])
    assert re.search(
        r"reference \(torch ops\).*no padding, prompts shared; agrees with the model's own forward within", lines[2]
    )
    assert "many_letters x 1" in lines[3]
    assert "transformers generate, in this process; 4 completions of up to 12 tokens a prompt" in lines[4]
    trainer.train()
    assert "fastgrpo |" not in capsys.readouterr().err
    assert not any(isinstance(callback, StartLines) for callback in trainer.callback_handler.callbacks)


def test_reward_weights_and_full_fine_tuning_are_shown(tmp_path):
    trainer = tiny_trainer(tmp_path, lora=False, reward_weights=[0.25])
    with fastgrpo.patch(trainer, fastgrpo.Options(packing="none")) as handle:
        text = "\n".join(start_lines(handle))
    assert f"{many_letters.__name__} x 0.25" in text
    assert "(all of the model), output head trained" in text
    assert "rows: as TRL pads (packing='none')" in text


def test_nothing_to_train_is_said_with_the_likely_cause(tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.model.requires_grad_(False)
    with fastgrpo.patch(trainer) as handle:
        assert any("trained: 0 parameters" in line and "target_modules" in line for line in start_lines(handle))
