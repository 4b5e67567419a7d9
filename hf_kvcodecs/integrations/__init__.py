"""Where users meet the caches: command line helpers, evaluation, recipes."""
