"""Real training, one process a stage, and how long it takes."""
