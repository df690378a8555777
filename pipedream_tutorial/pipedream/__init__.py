"""Pipeline schedules: simulated exactly, run for real, and drawn."""
