"""Examples: programs, and modules that options name, such as `examples.problems:additions`."""
