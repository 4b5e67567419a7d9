"""The operations on packed bytes, one folder each: a checked op, a readable reference, faster twins
of it."""
