"""Environments of other packages. Each package is an optional extra, imported on use."""
