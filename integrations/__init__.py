"""Adapters to unmodified training frameworks."""
