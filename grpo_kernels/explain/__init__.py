"""Explains the loss of a step, token by token."""

from .causes import Thresholds
from .explanation import Cause, Explanation
from .tokens import explain, join

__all__ = ["Cause", "Explanation", "Thresholds", "explain", "join"]
