"""Deciding: what a step moves and takes, on machines one has and on those one has not."""
