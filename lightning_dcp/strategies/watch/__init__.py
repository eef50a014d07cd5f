"""Ranks that die, stop, raise or disagree: noticed, named, and ended in bounded time."""
