"""Judges what racecheck printed:

compute-sanitizer --tool racecheck --print-limit 0 python tests/gpu/sanitize.py >races.txt 2>&1
python tests/gpu/hazards.py races.txt

Status 1 where a hazard is in a kernel that is not cuBLAS's, where the tool or what it ran failed, and where a report is missing
or cannot be read. cuBLAS's own cannot be left out beforehand (see sanitize.py).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CUBLAS = re.compile(r"^(void )?(nvjet_|cutlass|cublas)")
"""How the names of cuBLAS's kernels begin, and none of this library's."""
_REPORT = re.compile(r"^========= (Error|Warning|Info): Race reported between ")
_ACCESS = re.compile(r" access at (.+?)\+0x[0-9a-f]+")
_SUMMARY = re.compile(r"^========= RACECHECK SUMMARY: (\d+) hazards? displayed")
_KNOWN = re.compile(r"^========= COMPUTE-SANITIZER|^=========\s*$|^========= {2,}")
_INTERNAL = re.compile(r"\binternal\b.*\berror\b", re.IGNORECASE)


def judge(text: str) -> tuple[int, list[str]]:
    """
    What is wrong with a run of racecheck.

    Args:
        text: all that it printed.

    Returns:
        How many hazards it reports; a line for everything but those of cuBLAS, so none where the run is good.
    """
    reports, counted, wrong = 0, None, []
    for line in map(str.rstrip, text.splitlines()):
        report, access, summary = _REPORT.search(line), _ACCESS.search(line), _SUMMARY.search(line)
        reports += report is not None
        if summary is not None:
            counted = int(summary[1])
        elif line.startswith("=========") and access is not None:
            if CUBLAS.search(access[1]) is None:
                wrong.append(f"hazard in {access[1]}: {line}")
        elif _INTERNAL.search(line) or (
            line.startswith("=========") and (" access at " in line or not _KNOWN.search(line))
        ):
            wrong.append(line)
    if counted is None:
        wrong.append("no summary: racecheck did not run to its end")
    elif counted != reports:
        wrong.append(f"{counted} hazards in the summary, {reports} that could be read")
    return reports, wrong


if __name__ == "__main__":
    reports, wrong = judge(Path(sys.argv[1]).read_text(errors="replace"))
    print("\n".join(wrong) or f"{reports} hazards, all in cuBLAS's kernels")
    sys.exit(bool(wrong))
