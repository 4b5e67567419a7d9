"""Operations on packed bytes, a folder each: a checked op, a readable reference, fast twins."""
