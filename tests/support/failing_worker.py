"""Stand-ins for what a worker runs into: `python failing_worker.py PART -m MODULE PLAN DESCRIPTOR` acts one."""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable

from gradeflow.evaluation import worker
from gradeflow.evaluation.plan import Plan


def fill_disk(plan: Plan) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), plan.out)


def fill_memory(_: Plan) -> None:
    bytearray(1 << 62)


def fill_gpu(_: Plan) -> None:
    """In torch's words, which has an error of its own for it."""
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB")


def fill_vllm(_: Plan) -> None:
    """In the words of vLLM 0.31."""
    raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`")


def break_down(_: Plan) -> None:
    raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def be_killed(_: Plan) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(_: Plan) -> None:
    time.sleep(600)


def vanish(_: Plan) -> None:
    os._exit(3)


PARTS: dict[str, Callable[[Plan], None]] = {
    part.__name__: part for part in (fill_disk, fill_memory, fill_gpu, fill_vllm, break_down, be_killed, hang, vanish)
}

if __name__ == "__main__":
    worker.run = PARTS[sys.argv[1]]
    sys.exit(worker.main(*sys.argv[4:]))
