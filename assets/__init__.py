"""Bundled models, shipped as package data."""
