"""The HTTP door: OpenAI's API, and the pages that operators read, over router/inference.py."""
