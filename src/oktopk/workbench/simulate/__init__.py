"""The real reducers on many simulated ranks, and a model of what they send for more."""
