"""Weights versions: their life beside each other, and which one a request takes."""
