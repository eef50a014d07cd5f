"""Checkpoints of planned runs: what is written, what is read, how an epoch goes on."""
