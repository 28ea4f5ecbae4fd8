"""Sampling: prompts in, checked completions out."""
