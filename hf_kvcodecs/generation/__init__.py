"""Decoding with our caches: drafts, verification, and what they cost."""
