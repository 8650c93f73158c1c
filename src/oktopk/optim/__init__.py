"""Optimizers whose update travels, instead of the gradient: AdamW and SGD that train well with sparse exchanges."""

from oktopk.optim.adamw import AdamW
from oktopk.optim.sgd import SGD

__all__ = ["SGD", "AdamW"]
