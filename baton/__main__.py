"""`python -m baton`: the `baton` command, for images that start modules."""

from __future__ import annotations

from baton.cli.main import main

if __name__ == "__main__":
    main()
