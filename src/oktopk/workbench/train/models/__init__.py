"""The networks that the trainer's tasks train."""
