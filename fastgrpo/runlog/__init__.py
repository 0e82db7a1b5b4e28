"""`log.jsonl`: what a run was, what each step did, how it ended. One strict JSON object a line, told apart by `kind`."""

from fastgrpo.runlog.reading import RunRecord, find_run_logs, first_and_last, read_run_log, read_run_logs
from fastgrpo.runlog.schema import KEYS, SCHEMA
from fastgrpo.runlog.writing import RunLog, append_eval

__all__ = [
    "KEYS",
    "SCHEMA",
    "RunLog",
    "RunRecord",
    "append_eval",
    "find_run_logs",
    "first_and_last",
    "read_run_log",
    "read_run_logs",
]
