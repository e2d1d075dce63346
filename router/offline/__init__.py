"""Replays recorded traffic in virtual time under another policy. No network, no event loop, no torch."""
