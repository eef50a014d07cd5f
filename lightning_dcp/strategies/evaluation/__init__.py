"""Validation, testing and prediction by plan."""
