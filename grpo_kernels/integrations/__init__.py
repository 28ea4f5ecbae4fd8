"""Integrations with other trainers: transformers, TRL, Liger, verl (`docs/integrations.md`)."""
