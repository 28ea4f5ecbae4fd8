"""A step: judged completions in, gradients out."""
