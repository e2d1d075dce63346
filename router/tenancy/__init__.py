"""Whose requests these are, and how many they may send."""
