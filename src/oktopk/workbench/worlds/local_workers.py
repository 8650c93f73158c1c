"""Starting workers on this machine through torch's launcher."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def start_local_workers(num_workers: int, arguments: Sequence[str]) -> int:
    """`python arguments...` in `num_workers` processes that find each other over loopback; 0, or a bad exit code.

    What a worker has to say it says itself: the launcher adds nothing.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        return max(1, *(failure.exitcode for failure in error.failures.values()))
    return 0
