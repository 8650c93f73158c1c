"""Listeners: what is told of every reduction, and where it is written."""

from oktopk.metrics.trainer_lists import MetricLists, TrainerLists, format_mean, mean_or_none

__all__ = ["MetricLists", "TrainerLists", "format_mean", "mean_or_none"]
