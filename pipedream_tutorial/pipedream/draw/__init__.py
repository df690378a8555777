"""Pictures, in the terminal and as files."""
