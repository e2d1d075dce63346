"""`python -m prefill_worker`: runs one prefill worker in this process until SIGTERM."""

from __future__ import annotations

from baton.process import leave, report_errors
from prefill_worker.serve import ROLE

if __name__ == "__main__":
    leave(report_errors(ROLE.main))
