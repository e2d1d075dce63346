"""Computes prompts, samples the first token, and moves the KV to a decode worker."""
