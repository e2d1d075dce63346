"""`python -m decode_worker`: runs one decode worker in this process until SIGTERM, without Ray."""

from __future__ import annotations

from baton.process import leave, report_errors
from decode_worker.serve import ROLE

if __name__ == "__main__":
    leave(report_errors(ROLE.main))
