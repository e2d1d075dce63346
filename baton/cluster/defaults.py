"""What a cluster is unless told otherwise: names, addresses and bounds.

Constants only, and no import, so that the command line can show them without loading what uses them.
"""

from __future__ import annotations

from typing import Final

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
# Workers of one role; they share one machine.
MAX_WORKERS: Final = 64
DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
DEFAULT_ADMIN_ADDRESS: Final = "127.0.0.1:50052"
DEFAULT_CONTROL_ADDRESS: Final = "127.0.0.1:50053"
DEFAULT_HTTP_URL: Final = "http://127.0.0.1:8000/v1"
