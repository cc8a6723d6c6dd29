import hybridrl.errors  # noqa: F401  the package sets what torch reads when it is imported
