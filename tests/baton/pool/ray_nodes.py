"""`python -m tests.baton.pool.ray_nodes FOLDER`: a Ray of several nodes on this machine.

It ends with its standard input. Writes to FOLDER/nodes.json: {"address": "host:port", "nodes": {name: id}}.
Nodes "a" and "b" have one unit of `baton_decode_a` and `baton_decode_b`, node "b2" one of the latter too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

# The first is Ray's head too: one process of Ray's less to wait for.
NODES = {"a": "baton_decode_a", "b": "baton_decode_b", "b2": "baton_decode_b"}


def main() -> None:
    # As baton.pool.environment has it for Ray on loopback.
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_gcs_server_port_wait_time_s": "90",
    }
    from ray.cluster_utils import Cluster

    where = {"node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": 80 << 20}
    # Not below FOLDER: names of sockets are short.
    temporary = tempfile.TemporaryDirectory(prefix="baton-", ignore_cleanup_errors=True)
    where["temp_dir"] = temporary.name
    cluster = Cluster()
    try:
        nodes = {
            name: cluster.add_node(**where, num_cpus=1, resources={resource: 1}).node_id
            for name, resource in NODES.items()
        }
        partial = Path(sys.argv[1]) / "nodes.part"
        partial.write_text(json.dumps({"address": cluster.address, "nodes": nodes}))
        partial.replace(Path(sys.argv[1]) / "nodes.json")
        sys.stdin.read()
    finally:
        cluster.shutdown()
        temporary.cleanup()


if __name__ == "__main__":
    main()
