"""Runs a script on the one GPU that all ranks of this machine share; NCCL takes every rank for a host of its own.

    torchrun --nproc_per_node 2 benchmarks/share_gpu.py tools/bench_reshard.py --hf-model DIR ...

NCCL refuses two ranks of a host on one GPU. Between hosts it goes through sockets, so what this shows is that the NCCL
paths are right; their times say nothing.
"""

import os
import runpy
import sys
from pathlib import Path

os.environ |= {
    "LOCAL_RANK": "0",
    "NCCL_HOSTID": f"rank{os.environ['RANK']}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
