"""Accepts requests, decides where they run, and streams the answers. Never imports torch."""
