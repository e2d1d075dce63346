"""What `make check` asks of the source beyond what a linter can."""
