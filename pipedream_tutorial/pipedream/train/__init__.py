"""Real training under an order, in one process."""
