"""Shared pieces of architectures."""
