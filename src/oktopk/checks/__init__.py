"""What must hold in every step: finite gradients, the conservation law, the same bits on every rank."""
