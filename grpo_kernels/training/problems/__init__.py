"""Problems: rows of a dataset in, prompts and rewards out."""
