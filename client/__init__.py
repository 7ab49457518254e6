"""A small typed client of Baton's gRPC API."""

from baton.client.access import Access
from baton.client.aio_client import AsyncBatonClient
from baton.client.messages import RetryPolicy
from baton.client.sync_client import BatonClient

__all__ = ["Access", "AsyncBatonClient", "BatonClient", "RetryPolicy"]
