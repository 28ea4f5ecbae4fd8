"""A run: what outlives a step, and what a person sees of it."""
