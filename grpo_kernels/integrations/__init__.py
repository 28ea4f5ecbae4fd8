"""For those who have a trainer already: transformers, TRL, Liger, verl (`docs/integrations.md`)."""
