"""Streams: iterable-style data sets, planned window by window while they are read."""

from lightning_dcp.data.streams.loader import StreamLoader, is_stream, read_stream_loader
from lightning_dcp.data.streams.plans import StreamPlans
from lightning_dcp.data.streams.state import StreamState

__all__ = ["StreamLoader", "StreamPlans", "StreamState", "is_stream", "read_stream_loader"]
