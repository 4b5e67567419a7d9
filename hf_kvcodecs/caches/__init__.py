"""Drop-in ``transformers`` caches: the only room that subclasses ``transformers.Cache``."""
