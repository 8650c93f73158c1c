"""Dense beside every reducer: the same training over several seeds, and what came of it."""
