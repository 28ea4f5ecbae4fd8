"""What is not settled yet: names here may change."""

from ..execution import Sampled

__all__ = ["Sampled"]
