"""Claims about hazards.py and the parts of sanitize.py that the workflow names; no GPU needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import hazards
import pytest

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "gpu-bench.yml"
SPLIT = "nvjet_sm90_tss_64x104_64x10_4x1_v_bz_splitK_NNT"
OURS = "void fastgrpo::<unnamed>::row_cluster<(int)8, (fastgrpo::GradDtype)1, (bool)1>(fastgrpo::RowArgs)"
END = "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)\n"


def run(*reports: str, count: int | None = None) -> str:
    body = "".join(f"{report}\n========= \n" for report in reports)
    summary = END.format(len(reports) if count is None else count)
    return f"========= COMPUTE-SANITIZER\nhead ran\n{body}loss ran\n{summary}"


def report(first: str, *others: str, kind: str = "Error") -> str:
    lines = [f"========= {kind}: Race reported between Read access at {first}+0xae0"]
    lines += [f"=========     and Write access at {other}+0x36e0 [480 hazards]" for other in others]
    return "\n".join(lines)


def test_a_run_without_hazards_and_hazards_in_cublas_pass():
    assert hazards.judge(run()) == (0, [])
    cutlass = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(T1::Params) in gemm.cu:12"
    assert hazards.judge(run(report(SPLIT, SPLIT, SPLIT), report(cutlass, cutlass, kind="Warning"))) == (2, [])


@pytest.mark.parametrize("kind", ["Error", "Warning"])
@pytest.mark.parametrize(
    "accesses", [(OURS, OURS), (OURS, SPLIT), (SPLIT, SPLIT, OURS), (f"{OURS}+0x10 in row.cu:12",)]
)
def test_a_hazard_in_another_kernel_is_named(kind, accesses):
    reports, wrong = hazards.judge(run(report(SPLIT, SPLIT), report(*accesses, kind=kind)))
    assert reports == 2 and len(wrong) == sum("fastgrpo" in access for access in accesses)
    assert all("row_cluster" in line for line in wrong)


@pytest.mark.parametrize("name", ["void mine<nvjet_sm90>(int)", "void mine<cublasGemm>(int)", "mine(cutlass::Params)"])
def test_a_kernel_that_has_cublas_in_its_arguments_alone_is_another(name):
    _, wrong = hazards.judge(run(report(name)))
    assert len(wrong) == 1


@pytest.mark.parametrize(
    "line",
    [
        "========= Internal Sanitizer Error: an address is out of range",
        "Internal error of the tool",
        "========= Error: Potential WAW hazard detected at __shared__ 0x0 in block (0, 0, 0)",
        "========= Error: Race reported between Write access at 0x1d0 in race.cu:46",
        "=========     and Write access at row_cluster in row.cu:12 [4 hazards]",
        "========= Target application returned an error",
    ],
)
def test_any_other_word_of_the_tool_is_a_failure(line):
    _, wrong = hazards.judge(run(report(SPLIT, SPLIT)).replace("loss ran", line))
    assert line in wrong


def test_reports_that_are_missing_are_a_failure():
    assert "no summary" in hazards.judge(run().partition("========= RACE")[0])[1][0]
    assert hazards.judge("")[1]
    assert "3 hazards in the summary, 1 that could be read" in hazards.judge(run(report(SPLIT), count=3))[1]


@pytest.mark.parametrize(("kernel", "status"), [(SPLIT, 0), (OURS, 1)])
def test_the_status_is_the_judgement(tmp_path, kernel, status):
    (tmp_path / "races.txt").write_text(run(report(kernel, kernel)))
    done = subprocess.run([sys.executable, hazards.__file__, tmp_path / "races.txt"], capture_output=True, text=True)
    assert done.returncode == status
    assert ("row_cluster" in done.stdout) == bool(status)


@pytest.mark.skipif(not WORKFLOW.exists(), reason="the workflows are not part of an installed package")
def test_the_workflow_runs_synccheck_on_every_part_but_the_largest_cluster():
    tree = ast.parse((Path(__file__).parent / "sanitize.py").read_text())
    parts = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    workflow = re.sub(r"\\\n\s*", "", WORKFLOW.read_text())
    named = re.search(r"--tool synccheck .*sanitize\.py (.*)", workflow)
    assert named is not None and sorted(named[1].split()) == sorted(parts - {"largest_cluster"})
