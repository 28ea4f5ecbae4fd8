"""Adapters for other people's trainers: transformers, TRL, Liger, verl (`docs/integrations.md`)."""
