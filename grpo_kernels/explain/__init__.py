"""Tells which tokens, sequences and groups a step's loss comes from, and why."""
