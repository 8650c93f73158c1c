"""Looking at runs: pages and pictures made from what they wrote."""
