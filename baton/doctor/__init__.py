"""What `baton doctor` looks at: this machine, what is installed, and the cluster if one runs.

Every check works in the base install and with nothing running; what cannot be known is said, not guessed.
"""
