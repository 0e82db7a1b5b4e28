"""`python -m bench`: what it writes, what `--compare` says, and that its adapters compute what they claim to."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fastgrpo
from bench import head, report, train, update
from bench.__main__ import main
from bench.measure import MIB, extra_peak_bytes, interleave
from bench.peers import TASKS, peers, truth
from bench.report import regressions, vanished
from bench.workloads import QUICK, QUICK_VISION
from fastgrpo.kernels.library import LibraryInfo

CPU = torch.device("cpu")
HEAD = ["head", "--device", "cpu", "--quick", "--dtype", "float32", "--rounds", "1", "--threads", "1"]
UPDATE = ["update", "--device", "cpu", "--quick", "--rounds", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def head_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "folder" / "head.json"
    assert main([*HEAD, "--json", str(path)]) == 0
    return path


def test_a_run_reads_back_with_what_a_number_needs_beside_it(head_run: Path) -> None:
    run = json.loads(head_run.read_text())
    assert run["schema"] == 1 and run["kind"] == "head"
    assert run["command"].startswith("python -m bench") and run["date"].startswith("20")
    assert run["machine"]["name"] and run["machine"]["threads"] == 1
    assert run["versions"]["torch"] and run["versions"]["trl"]
    assert {"commit", "library"} <= run.keys()
    assert len(run["ratios"]) == 4 * 5 + 3
    assert all(0 < ratio < float("inf") for ratio in run["ratios"].values()), run["ratios"]


def test_the_commit_is_that_of_the_checkout_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, inner = tmp_path / "checkout", tmp_path / "checkout" / "copy"
    inner.mkdir(parents=True)
    (root / "tracked").write_text("as committed")

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=n@n", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert report.commit(root) is None
    git("init", "-q")
    assert report.commit(root) is None, "nothing is committed"
    git("add", "tracked")
    git("commit", "-qm", "first")
    head_of_it = git("rev-parse", "HEAD")
    (root / "untracked").write_text("a run")
    assert report.commit(root) == head_of_it
    assert report.commit(inner) is None, "a copy within another checkout"
    (root / "tracked").write_text("changed")
    assert report.commit(root) == f"{head_of_it}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert report.commit(root) is None, "no git"


def test_a_git_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "git"
    slow.write_text('#!/bin/sh\necho "$3"\necho 1234\nexec sleep 60\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(report, "_GIT_SECONDS", 0.2)
    assert report.commit(tmp_path) is None


def test_the_library_is_known_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "library.so"
    file.write_bytes(b"code")
    monkeypatch.setattr(report, "library_info", lambda: LibraryInfo(file))
    assert report._library() == hashlib.sha256(b"code").hexdigest()[:16]
    monkeypatch.setattr(report, "library_info", lambda: LibraryInfo(None, reason="none was built"))
    assert report._library() is None
    monkeypatch.setattr(report, "library_info", lambda: LibraryInfo(tmp_path / "gone.so"))
    assert report._library() is None


def test_the_line_beside_numbers_has_the_commit_where_there_is_one(head_run: Path) -> None:
    run = json.loads(head_run.read_text())
    assert "; commit 1234-dirty; " in report.describe(run | {"commit": "1234-dirty"})
    assert "; commit " not in report.describe(run | {"commit": None})
    del run["commit"], run["library"]
    assert "; commit " not in report.describe(run), "stored before runs said so"


def test_every_peer_is_a_line_with_numbers_or_a_reason(head_run: Path) -> None:
    rows = json.loads(head_run.read_text())["rows"]
    names = {row["peer"] for row in rows}
    assert {head.FLOOR, head.OURS, head.TRL_AS_CALLED, head.TRL_ROWS, "Liger", "Unsloth"} <= names
    for row in rows:
        assert row["note"] or row["seconds"], row


def test_a_peer_that_fails_at_one_task_is_noted_once_for_each_reason() -> None:
    works, fails = {"peer": "p", "note": ""}, {"peer": "p", "note": "fails: ValueError"}
    assert head._notes({"forward": [works], "frozen": [fails], "trained": [fails], "entropy": [works]}) == [
        "p: fails: ValueError"
    ]


@pytest.mark.parametrize(("factor", "status"), [(1 / 1.04, 0), (1 / 1.06, 1), (1.06, 0)])
def test_compare_tells_by_its_exit_status_whether_a_ratio_got_worse(
    head_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, status: int
) -> None:
    run = json.loads(head_run.read_text())
    monkeypatch.setattr(head, "run", lambda *_: run)
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps(run | {"ratios": {name: ratio * factor for name, ratio in run["ratios"].items()}}))
    assert main([*HEAD, "--compare", str(stored)]) == status


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"schema": 1, "kind": "update", "ratios": {}}', '{"schema": 1, "kind": "head"}'),
        *(
            f'{{"schema": 1, "kind": "head", "ratios": {ratios}}}'
            for ratios in (
                "[1.0]",
                '{"a": null}',
                '{"a": "3"}',
                '{"a": 0}',
                '{"a": -1}',
                '{"a": NaN}',
                '{"a": Infinity}',
            )
        ),
    ],
)
def test_compare_with_something_else_is_status_2_before_any_work(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "run", lambda *_: pytest.fail("measured"))
    stored = tmp_path / "stored.json"
    stored.write_text(content)
    assert main([*HEAD, "--compare", str(stored)]) == 2
    assert main([*HEAD, "--compare", str(tmp_path / "nothing.json")]) == 2


def test_compare_with_other_shapes_is_status_2(head_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = json.loads(head_run.read_text())
    monkeypatch.setattr(head, "run", lambda *_: run | {"ratios": {"another shape": 1.0}})
    assert main([*HEAD, "--compare", str(head_run)]) == 2


def test_a_regression_is_a_ratio_more_than_five_percent_up() -> None:
    stored = {"ratios": {"a": 1.0, "b": 1.0, "c": 1.0, "gone": 1.0}}
    run = {"ratios": {"a": 1.04, "b": 1.06, "c": 0.5, "new": 9.0}}
    assert regressions(run, stored) == (["a", "b", "c"], ["b"])
    assert vanished(run, stored) == ["gone"]


def test_a_ratio_that_is_no_number_any_more_is_a_regression() -> None:
    stored = {"ratios": {"lost": 1.0, "infinite": 1.0}}
    run = {"ratios": {"lost": math.nan, "infinite": math.inf}}
    assert regressions(run, stored)[1] == ["lost", "infinite"]


def test_compare_names_a_ratio_that_is_no_number_any_more(
    head_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = json.loads(head_run.read_text())
    first = next(iter(run["ratios"]))
    monkeypatch.setattr(head, "run", lambda *_: run | {"ratios": run["ratios"] | {first: math.nan}})
    assert main([*HEAD, "--compare", str(head_run)]) == 1
    assert f"no number: {first}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ([], 1),
        (["--rounds", "1"], 1),
        (["--dtype", "float32"], 0),
        (["--only", "quick"], 0),
        (["--task", "forward", "frozen"], 0),
        (["--data", "mixed"], 0),
    ],
)
@pytest.mark.parametrize("same_settings", [False, True])
def test_ratios_that_vanish_are_named_and_are_status_1_where_nothing_chosen_leaves_them_out(
    head_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
    options: list[str],
    status: int,
    same_settings: bool,
) -> None:
    run = json.loads(head_run.read_text())
    monkeypatch.setattr(head, "run", lambda *_: run)
    stored = tmp_path / "stored.json"
    gone = {f"a shape of some length that is gone/float32/trained/time, number {number}": 1.0 for number in range(5)}
    settings = run["settings"] | ({"rounds": 9} if same_settings else {"tasks": ["others"]})
    stored.write_text(json.dumps(run | {"ratios": run["ratios"] | gone, "settings": settings}))
    status = 1 if same_settings else status
    assert main(["head", "--device", "cpu", "--quick", "--threads", "1", *options, "--compare", str(stored)]) == status
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "were not measured" in line]
    first, second, third, *_ = gone
    assert line.startswith(f"5 of {len(run['ratios']) + 5} stored ratios were not measured")
    assert line.endswith(f": {first}; {second}; {third}; ...")
    assert ("nothing chosen leaves them out" in line) == bool(status)


@pytest.mark.parametrize(
    ("bench", "options", "status"),
    [(train, [], 1), (train, ["--train", "lora"], 0), (update, [], 1), (update, ["--train", "lora", "full"], 0)],
)
def test_what_trains_is_a_selection_only_where_it_is_given(
    bench, options: list[str], status: int, head_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = bench.__name__.removeprefix("bench.")
    run = json.loads(head_run.read_text()) | {"kind": kind, "ratios": {"a": 1.0}}
    asked: list = []
    monkeypatch.setattr(bench, "run", lambda *given: asked.append(given) or run)
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps(run | {"ratios": {"a": 1.0, "gone": 1.0}, "settings": {}}))
    assert main([kind, "--device", "cpu", "--quick", "--threads", "1", *options, "--compare", str(stored)]) == status
    assert asked[0][2] == (options[1:] or ["lora", "full"])


def test_the_one_pass_and_small_chunks_have_ratios_of_memory() -> None:
    names = (head.FLOOR, head.OURS, head.TRL_AS_CALLED, head.TRL_ROWS, head.OURS_IN_ONE_PASS, head.OURS_IN_SMALL_CHUNKS)
    line = {"seconds": [1.0], "time_over_floor": 1.0, "busy_time_over_floor": None, "time_over_fastgrpo": 1.0}
    lines = [line | {"peer": name, "extra_mib": 2.0**position} for position, name in enumerate(names)]
    ratios = head._ratios("key", lines)
    assert ratios[f"key/memory: {head.OURS_IN_ONE_PASS} over {head.TRL_ROWS}"] == 2.0
    assert ratios[f"key/memory: {head.OURS_IN_SMALL_CHUNKS} over {head.TRL_ROWS}"] == 4.0
    missing = {"peer": head.TRL_ROWS, "note": "not installed"}
    without = head._ratios("key", [missing if line["peer"] == head.TRL_ROWS else line for line in lines])
    assert not any(head.TRL_ROWS in name for name in without)


@pytest.mark.parametrize("data", head.DATA)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("peer", [peer.name for peer in peers(torch.float32) if not peer.missing])
def test_adapters_agree_with_float64(peer: str, task: str, data: str) -> None:
    adapter = next(candidate for candidate in peers(torch.float32) if candidate.name == peer)
    if task not in adapter.tasks:
        pytest.skip(f"{peer} has no {task}")
    problem = head.make_problem(head.QUICK_SHAPES[0].of(data), torch.float32, CPU)
    found = adapter.run(problem, task).at_rows(problem)
    for got, wanted in zip(found, truth(problem, task, block=16), strict=True):
        assert wanted is None or got is None or torch.allclose(got.double(), wanted, rtol=1e-4, atol=1e-5), (
            (got - wanted).abs().max()
        )


@pytest.mark.parametrize("task", ["forward", "frozen", "trained"])
def test_small_chunks_agree_with_float64(task: str) -> None:
    on_card = {peer.name: peer for peer in peers(torch.float32, torch.device("cuda"))}
    small = on_card[head.OURS_IN_SMALL_CHUNKS]
    assert task in small.tasks
    problem = head.make_problem(head.QUICK_SHAPES[0], torch.float32, CPU)
    found = small.run(problem, task).at_rows(problem)
    for got, wanted in zip(found, truth(problem, task), strict=True):
        assert (got is None) == (wanted is None)
        assert wanted is None or torch.allclose(got.double(), wanted, rtol=1e-4, atol=1e-5)


def test_cut_cross_entropy_is_called_without_its_filter_and_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module, asked = ModuleType("cut_cross_entropy"), []

    def linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **options: object):
        asked.append(options)
        return torch.nn.functional.cross_entropy(hidden @ weight.t(), targets, reduction="none")

    module.linear_cross_entropy = linear_cross_entropy
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", module)
    problem = head.make_problem(head.QUICK_SHAPES[0], torch.float32, CPU)
    both = [peer for peer in peers(torch.float32) if peer.name.startswith("Cut Cross-Entropy")]
    for peer in both:
        assert peer.run(problem, "trained").grad_weight is not None
    assert [peer.name for peer in both] == ["Cut Cross-Entropy", "Cut Cross-Entropy, filtered"]
    common = {"reduction": "none", "softcap": None}
    assert asked == [common | {"filter_eps": None}, common]


def test_targets_are_as_likely_as_the_data_set_promises() -> None:
    likely, inputs = {}, {}
    for data in head.DATA:
        problem = head.make_problem(head.CPU_SHAPES[1].of(data), torch.float32, CPU)
        assert 1.4 < (problem.rows @ problem.weight.t()).std() < 2, data
        likely[data] = truth(problem, "forward").logprobs.exp()
        inputs[data] = problem
    assert likely["random"].max() < 0.1 and likely["random"].median() < 1e-3
    assert (likely["mixed"] < 1e-3).double().mean() > 0.5 and (likely["mixed"] > 0.5).double().mean() > 0.1
    assert likely["peaked"].median() > 0.95 and (likely["peaked"] > 0.5).double().mean() > 0.95
    assert likely["peaked"].log().mean() < -0.01
    assert all(torch.equal(inputs["mixed"].targets, problem.targets) for problem in inputs.values())
    assert all(torch.equal(inputs["mixed"].weight, problem.weight) for problem in inputs.values())


def test_a_shape_with_another_data_set_has_another_name_and_no_double() -> None:
    plain = head.CPU_SHAPES[1]
    assert [plain.of(data).name for data in head.DATA] == ["odd V", "odd V, random", "odd V, peaked"]
    assert plain.of("peaked").of("random") == plain.of("random") and plain.of("peaked").of("mixed") == plain
    names = [shape.name for shape in head.CUDA_SHAPES]
    assert len(set(names)) == len(names)
    for data in ("random", "peaked"):
        (shape,) = {shape.of(data) for shape in head.CUDA_SHAPES if shape.name.startswith("8192 x 4096 x 128256")}
        assert shape in head.CUDA_SHAPES


def test_every_shape_takes_the_data_set_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "head.json"
    assert main([*HEAD, "--task", "forward", "--data", "peaked", "--json", str(path)]) == 0
    run = json.loads(path.read_text())
    assert [(shape["name"], shape["data"]) for shape in run["settings"]["shapes"]] == [("quick, peaked", "peaked")]
    assert all(name.startswith("quick, peaked/float32/forward/") for name in run["ratios"])


def test_problem_masks_the_fraction_it_promises() -> None:
    problem = head.make_problem(head.CPU_SHAPES[1], torch.float32, CPU)
    assert abs(problem.scored.double().mean() - 0.6) < 0.05
    assert not problem.scored[:, 0].any() and not problem.scored[:, -1].any()


def test_peak_counts_what_is_alive_at_once() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            torch.empty(MIB, dtype=torch.uint8)

    def together() -> None:
        first = torch.ones(MIB // 4)
        first.mul(2).sum()

    assert extra_peak_bytes(one_after_the_other, CPU) == MIB
    assert 2 * MIB <= extra_peak_bytes(together, CPU) <= 2 * MIB + 1024


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc/self/clear_refs")
def test_peak_equals_the_growth_of_the_resident_set() -> None:
    script = """
import torch
from bench.measure import extra_peak_bytes

def work():
    logits = torch.randn(1024, 576) @ torch.randn(576, 16384)
    logits.exp().sum()

def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

torch.set_num_threads(1)
work()
open("/proc/self/clear_refs", "w").write("5")
before = kib("VmRSS")
work()
print((kib("VmHWM") - before) / 1024, extra_peak_bytes(work, torch.device("cpu")) / 2**20)
"""
    # Every tensor in a mapping of its own: freed memory leaves the process at once.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    resident, counted = map(float, done.stdout.split())
    assert counted > 128
    assert abs(resident - counted) < 0.03 * counted, f"resident set {resident} MiB, counted {counted} MiB"


def test_interleaved_cases_meet_in_every_round_behind_many_others() -> None:
    def order(rounds: int) -> list[str]:
        names: list[str] = []
        cases = {name: (lambda name=name: names.append(name)) for name in "abcd"}
        timings = interleave(cases, rounds, warm_ups=1, device=CPU)
        assert all(len(timing.seconds) == len(timing.cpu_seconds) == rounds for timing in timings.values())
        return names

    names = order(10)
    assert len(names) == 44
    assert all(sorted(names[start : start + 4]) == list("abcd") for start in range(0, 44, 4))
    before = {(last, name) for last, name in itertools.pairwise(names) if last != name}
    assert len(before) == 12, "every case came behind every other one"
    assert order(10) == names


def test_every_clock_goes_through_all_cases_in_every_round() -> None:
    order: list[str] = []

    def clock(field: str):
        def run(case):
            case()
            order.append(field)
            return {field: float(len(order))}

        return run

    cases = {name: (lambda name=name: order.append(name)) for name in "ab"}
    timings = interleave(cases, 2, 0, CPU, [clock("seconds"), clock("busy_seconds")])
    assert order[1::2] == ["seconds", "seconds", "busy_seconds", "busy_seconds"] * 2
    names = "".join(order[::2])
    assert all(sorted(names[start : start + 2]) == ["a", "b"] for start in range(0, 8, 2))
    places = {name: [2.0 * place + 2 for place, found in enumerate(names) if found == name] for name in "ab"}
    for name, (first, first_busy, second, second_busy) in places.items():
        assert timings[name].seconds == (first, second) and timings[name].busy_seconds == (first_busy, second_busy)
    ratios = [a / b for a, b in zip(timings["a"].busy_seconds, timings["b"].busy_seconds, strict=True)]
    assert timings["a"].busy_over(timings["b"]) == pytest.approx(sum(ratios) / 2)


def test_update_measures_stock_and_patched_on_the_same_gradients(tmp_path: Path) -> None:
    path = tmp_path / "update.json"
    assert main([*UPDATE, "--json", str(path)]) == 0
    run = json.loads(path.read_text())
    assert [row["path"] for row in run["rows"]] == ["TRL", "fastgrpo"] * 4
    for stock, patched in zip(run["rows"][::2], run["rows"][1::2], strict=True):
        assert patched["grad_difference"] < 1e-5
        assert patched["loss"] == pytest.approx(stock["loss"], abs=1e-6)
        assert patched["head_mib"] < stock["head_mib"]


def test_gradients_of_both_are_set_beside_a_float32_run(tmp_path: Path) -> None:
    path = tmp_path / "update.json"
    assert main([*UPDATE, "--precision", "bfloat16", "--train", "lora", "--json", str(path)]) == 0
    errors = [row.get("grad_error") for row in json.loads(path.read_text())["rows"]]
    assert errors[:2] == [None, None]
    assert all(1e-4 < error < 0.05 for error in errors[2:])


def test_pictures_are_measured_whole_and_in_parts_where_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "update.json"
    assert main([*UPDATE, "--only", "vision", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["workload"], row["path"]) for row in rows] == [
        (name, who) for name in ("quick vision", "quick vision in parts") for who in ("TRL", "fastgrpo")
    ]
    assert all(row["grad_difference"] < 1e-5 for row in rows)
    assert all(row["update_mib"] < rows[0]["update_mib"] for row in rows if row["path"] == "fastgrpo")


def test_every_row_has_the_picture_of_its_prompt() -> None:
    workload, (left, right) = QUICK_VISION, QUICK_VISION.prompt_tokens
    batch = update.synthetic_batch(workload, CPU)
    tokens, patches = workload.vision.side**2 // 4, workload.vision.side**2
    assert batch["mm_token_type_ids"].sum(1).tolist() == [tokens] * 4
    pictures = batch["pixel_values"].reshape(workload.prompts, workload.completions, patches, -1)
    assert torch.equal(pictures[:, 0], pictures[:, 1]) and not torch.equal(pictures[0], pictures[1])
    assert batch["prompt_mask"].sum(1).unique().tolist() == [left, right]
    special = batch["prompt_ids"] >= workload.vocabulary - 4
    assert special.sum(1).tolist() == [tokens + 2] * 4 and bool((special <= batch["prompt_mask"].bool()).all())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_training_starts_from_the_same_completions_and_metrics(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    command = [
        "train",
        "--device",
        "cpu",
        "--quick",
        "--steps",
        "2",
        "--repeatable",
        "--threads",
        "1",
        "--json",
        str(path),
    ]
    assert main(command) == 0
    run = json.loads(path.read_text())
    assert [(row["case"], row["path"]) for row in run["rows"]] == [
        (case, name) for case in ("lora", "full") for name in ("TRL", "fastgrpo")
    ]
    for stock, patched in zip(run["rows"][::2], run["rows"][1::2], strict=True):
        assert patched["same_completions"]
        assert patched["first_step"] == pytest.approx(stock["first_step"], abs=1e-5)
        assert len(patched["seconds"]) == len(patched["generation_seconds"]) == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_training_learns_from_the_completions_that_another_one_drew() -> None:
    once = partial(train.train_once, train.QUICK_TRAINED, CPU, "float32", "lora", 2)
    stock = once(patched=False)
    others = copy.deepcopy(stock.drawn)
    for drawn in others:
        drawn[0][:] = [[3, 5, 1] for _ in drawn[0]]
    patched = once(patched=True, replayed=others)
    assert [line["completions/mean_length"] for line in patched.history if "reward" in line] == [3, 3]
    assert patched.drawn[0] == stock.drawn[0] != others[0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("old_pass", "calls"), [(False, 2), (True, 3)])
def test_the_old_pass_is_one_more_scoring(old_pass: bool, calls: int, tmp_path: Path) -> None:
    batch = update.synthetic_batch(QUICK, CPU)
    trainer = update.build_trainer(QUICK, batch, CPU, "float32", "lora", False, old_pass, str(tmp_path))
    score, seen = trainer._get_per_token_logps_and_entropies, []
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: seen.append(args) or score(*args, **kwargs)
    update.one_update(trainer)
    assert len(seen) == calls


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_update_is_an_optimizer_step_in_which_groups_come_together(tmp_path: Path) -> None:
    workload = dataclasses.replace(QUICK, completions=4, micro_batch=4)
    batch = update.synthetic_batch(workload, CPU)
    trainer = update.build_trainer(workload, batch, CPU, "float32", "lora", False, False, str(tmp_path))
    seen: list[int] = []
    count = lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel())  # noqa: E731
    with fastgrpo.patch(trainer):
        trainer.model.register_forward_pre_hook(count, with_kwargs=True)
        for _ in range(2):
            update.one_update(trainer)
    prompts = int(batch["prompt_mask"][:: workload.completions].sum())
    assert sum(seen) == 2 * (prompts + int(batch["completion_mask"].sum()))


def test_synthetic_batch_is_padded_as_trl_pads() -> None:
    batch = update.synthetic_batch(QUICK, CPU)
    for name, fall in (("prompt_mask", 1), ("completion_mask", -1)):
        steps = batch[name].diff(dim=1)
        assert ((steps == 0) | (steps == fall)).all()
    tokens = update.count_tokens(batch)
    assert tokens["scored"] < tokens["real"] < tokens["padded"]
    assert tokens["scored"] == int(batch["num_items_in_batch"])


def test_a_summary_sets_a_run_beside_the_stored_one_and_marks_what_got_worse(
    head_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = json.loads(head_run.read_text())
    first, second, *_ = run["ratios"]
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps(run | {"ratios": {first: run["ratios"][first] / 1.5, second: run["ratios"][second]}}))
    assert main(["summary", str(head_run), "--against", str(stored)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (worse,) = [line for line in lines if "worse" in line]
    assert first in worse and "+50.0%" in worse
    assert sum(line.startswith("|") for line in lines) == 2 + len(run["ratios"])
    assert "unfinished" not in "\n".join(lines)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert main(["summary", str(broken)]) == 2
    assert str(broken) in capsys.readouterr().err


def test_a_summary_has_a_line_for_a_stored_ratio_that_was_not_measured(
    head_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = json.loads(head_run.read_text())
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps(run | {"ratios": run["ratios"] | {"one that is gone": 1.25}}))
    assert main(["summary", str(head_run), "--against", str(stored)]) == 0
    assert "| one that is gone | not measured | 1.250 | |" in capsys.readouterr().out.splitlines()


def test_a_summary_says_which_run_is_not_finished(
    head_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, cut_off = json.loads(head_run.read_text()), tmp_path / "cut-off.json"
    cut_off.write_text(json.dumps(run | {"unfinished": True}))
    assert main(["summary", str(cut_off), "--against", str(head_run)]) == 0
    assert "### head, unfinished" in capsys.readouterr().out
    assert main(["summary", str(head_run), "--against", str(cut_off)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "### head" in out and f"| ratio, lower is better | now | {run['date'][:10]}, unfinished | change |" in out


def test_the_plan_is_set_beside_a_measured_update(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = ["plan", "--device", "cpu", "--quick", "--threads", "1", "--only", "0.6B, full, float32"]
    assert main([*options, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["predicted_gb"] > 0 and row["measured_gb"] > 0
    # Tiny layers on a CPU, where attention's blocks count: an order of magnitude, no claim.
    assert 0.3 < row["ratio"] < 3, row


def test_what_the_run_log_costs_is_measured_in_a_real_run(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    assert main(["log", "--device", "cpu", "--quick", "--threads", "1", "--steps", "3", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["lines"] == 3 and 0 < row["log_cpu_s"] < row["step_cpu_s"]


def test_what_an_update_asks_of_the_processor_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert main(["host", "--quick", "--threads", "1", "--json", str(path)]) == 0
    run = json.loads(path.read_text())
    stock, patched = run["rows"]
    for count in ("torch ops", "with a kernel", "autograd nodes", "Python calls"):
        assert patched[count] > 0
        assert run["ratios"][f"{count}: fastgrpo over TRL"] == patched[count] / stock[count]
    assert patched["with a kernel"] < patched["torch ops"]
    assert patched["autograd nodes"] < stock["autograd nodes"]


@pytest.mark.parametrize("bench", [head, update], ids=["head", "update"])
def test_a_run_that_is_cut_off_has_stored_what_it_measured(bench, tmp_path, monkeypatch):
    path, measure, calls = tmp_path / "run.json", bench._measure, []

    def once(*given):
        calls.append(given)
        if len(calls) > (len(TASKS) if bench is head else 1):
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(bench, "_measure", once)
    options = [*HEAD, "--dtype", "float32", "bfloat16"] if bench is head else UPDATE
    options = [*options, "--json", str(path)]
    with pytest.raises(KeyboardInterrupt):
        main(options)
    run = json.loads(path.read_text())
    assert run["unfinished"] is True and run["rows"] and run["ratios"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--quick", "--steps", "1"], "--steps is 1; give at least 2, times are those after the first"),
        (["head", "--quick", "--rounds", "0"], "--rounds is 0; give at least 1"),
        (["head", "--quick", "--threads", "0"], "--threads is 0; give at least 1"),
        (["head", "--quick", "--json", "bench"], "--json is bench, which cannot be written; give the path of a file"),
        (["head", "--quick", "--json", "setup.py/a.json"], "setup.py/a.json, which cannot be written"),
        (["log", "--steps", "0"], "--steps is 0; give at least 1"),
        (["head", "--quick", "--busy"], "--busy times calls behind other work of a device, and --device is cpu"),
    ],
)
def test_what_cannot_be_measured_is_said_first(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main([*arguments[:1], "--device", "cpu", *arguments[1:]])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bench", "message"),
    [
        ("head", "no shape's name holds nothing; they are quick"),
        ("update", "no workload's name holds nothing; they are quick"),
        ("plan", "no setting's name holds nothing; they are"),
    ],
)
def test_a_name_that_nothing_has_is_an_error(bench: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main([bench, "--device", "cpu", "--quick", "--only", "nothing"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_that_is_not_there_is_said_first(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["head", "--device", "cuda", "--quick"])
    assert "torch sees no CUDA device here; give cpu" in capsys.readouterr().err
