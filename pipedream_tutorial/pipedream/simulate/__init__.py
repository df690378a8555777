"""Orders run on an exact clock."""
