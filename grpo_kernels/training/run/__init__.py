"""A run: its state between steps, its files, and its observers."""
