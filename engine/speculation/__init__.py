"""Drafts: how many, how they are chosen, and which of them stand."""
