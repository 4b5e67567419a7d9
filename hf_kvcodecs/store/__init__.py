"""Where exact keys and values live: host memory, files, and what is shared between requests."""
