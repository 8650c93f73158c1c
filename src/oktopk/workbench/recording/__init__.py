"""What a run writes down while it trains: profiles and gradients."""
