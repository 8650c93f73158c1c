"""What one reduction did and cost, and who is told."""
