from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
import two_processes


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_two_processes_with_unequal_token_counts_train_as_stock_does(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    logs = [tmp_path / f"rank{rank}.txt" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, two_processes.__file__, str(tmp_path / str(rank))],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break  # the other one may wait for this one for ever
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
    for rank, (process, log) in enumerate(zip(processes, logs, strict=True)):
        output = log.read_text()
        assert not process.poll(), f"rank {rank}:\n{output[-6000:]}"
        for case in two_processes.CASES:
            assert f"equal: {case}\n" in output, f"rank {rank} did not finish {case!r}:\n{output[-6000:]}"
