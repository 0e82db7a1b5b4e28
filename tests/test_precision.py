"""Claims about `choose_precision`: who decides, in which order, and what no one may say."""

from __future__ import annotations

import types

import pytest
import torch

from fastgrpo.precision import choose_precision, training_device


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("FASTGRPO_FORCE_FLOAT32", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)


def cards(monkeypatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])


@pytest.mark.parametrize(
    ("capabilities", "name"),
    [([(9, 0)], "bf16"), ([(8, 0), (8, 6)], "bf16"), ([(7, 5)], "fp16"), ([(8, 0), (7, 5)], "fp16")],
)
def test_bfloat16_where_every_card_has_it_in_hardware_else_float16(monkeypatch, capabilities, name):
    cards(monkeypatch, *capabilities)
    assert choose_precision(device="cuda").name == name


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_float32_on_cpu_and_mps(device):
    chosen = choose_precision(device=device)
    assert (chosen.name, chosen.autocast) == ("fp32", "no")
    assert device in chosen.reason


@pytest.mark.parametrize(("module", "name"), [({"is_bf16_supported": lambda: True}, "bf16"), ({}, "fp32")])
def test_other_devices_are_asked_for_bfloat16(monkeypatch, module, name):
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(**module))
    assert choose_precision(device="xpu").name == name


@pytest.mark.parametrize(("value", "name"), [("no", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), ("", "fp16")])
def test_the_variable_of_accelerate_wins_over_the_device(monkeypatch, value, name):
    cards(monkeypatch, (7, 5))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", value)
    assert choose_precision(device="cuda").name == name


@pytest.mark.parametrize(("value", "forced"), [("1", True), ("0", False), ("", False)])
def test_forced_float32_wins_over_everything(monkeypatch, value, forced):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("FASTGRPO_FORCE_FLOAT32", value)
    for given in ({}, {"bf16": True}, {"fp16": True}):
        chosen = choose_precision(**given, device="cuda")
        assert chosen.forced == forced
        assert (chosen.name == "fp32") == forced


@pytest.mark.parametrize("variable", ["FASTGRPO_FORCE_FLOAT32", "ACCELERATE_MIXED_PRECISION"])
@pytest.mark.parametrize("value", ["fp8", "true", "FP16", "2"])
def test_an_unknown_value_of_a_variable_is_an_error_that_names_the_allowed(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    allowed = "'no', 'fp16' and 'bf16'" if variable.startswith("ACC") else "1 forces float32, 0"
    for given in ({}, {"bf16": True}):
        with pytest.raises(ValueError, match=f"{variable} is '{value}' in the environment; {allowed}"):
            choose_precision(**given, device="cpu")


@pytest.mark.parametrize(
    ("given", "variable", "name"),
    [
        ({"bf16": True}, "fp16", "bf16"),
        ({"fp16": True}, "bf16", "fp16"),
        ({"bf16": False}, "bf16", "fp32"),  # an explicit no is not overruled
        ({"bf16": False}, "fp16", "fp16"),  # and says nothing of the other
        ({"bf16": False}, None, "fp32"),  # as in TRL
        ({"fp16": False}, None, "bf16"),  # as in TRL
        ({"fp16": False}, "fp16", "bf16"),
        ({"fp16": False, "bf16": False}, "fp16", "fp32"),
    ],
)
def test_arguments_win_over_variable_and_device(monkeypatch, given, variable, name):
    cards(monkeypatch, (9, 0))
    if variable:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", variable)
    assert choose_precision(**given, device="cuda").name == name


def test_without_float16_a_card_without_bfloat16_trains_in_float32(monkeypatch):
    cards(monkeypatch, (7, 5))
    assert choose_precision(fp16=False, device="cuda").name == "fp32"


def test_both_at_once_are_an_error():
    with pytest.raises(ValueError, match="give one of them"):
        choose_precision(bf16=True, fp16=True, device="cpu")


@pytest.mark.parametrize(("value", "device"), [("true", "cpu"), ("1", "cpu"), ("false", "cuda"), (None, "cuda")])
def test_the_training_device_is_accelerates(monkeypatch, value, device):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    if value is not None:
        monkeypatch.setenv("ACCELERATE_USE_CPU", value)
    assert training_device() == device
    assert training_device(use_cpu=True) == "cpu"
