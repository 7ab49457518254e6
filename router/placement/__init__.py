"""Chooses the workers that serve a request: membership, caches held, and cost of each option."""
