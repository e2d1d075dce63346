"""The `baton` command."""

import os

# gRPC reads it when it is imported. Its own lines about closed connections are nothing for a terminal.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
