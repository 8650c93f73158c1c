"""Whoever hands buckets to an AllReducer: a DDP hook, an optimizer wrapper."""
