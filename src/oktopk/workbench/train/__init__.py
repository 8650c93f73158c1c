"""Training with the library: data, models and the loop."""
