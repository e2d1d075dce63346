"""Reserves blocks, receives KV, and generates tokens by continuous batching."""
