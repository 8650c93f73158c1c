"""What can be trained: each task builds a Workload."""

from __future__ import annotations

import importlib

from oktopk.workbench.train.config import ConfigError, TrainConfig
from oktopk.workbench.train.task_settings import TASKS
from oktopk.workbench.train.tasks.base import Workload
from oktopk.workbench.worlds.membership import Member


def build_workload(config: TrainConfig, member: Member) -> Workload:
    """Imports what the task needs; ConfigError where that is not installed."""
    try:
        module = importlib.import_module(TASKS[config.task].module)
        workload: Workload = module.build(config, member)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task={config.task!r}: needs {error.name!r}, which is not installed; pip install 'oktopk[train]', "
            "for BERT and for tokens=wordpiece also 'oktopk[bert]'"
        ) from error
    return workload
