from __future__ import annotations

from pathlib import Path

from baton.host_memory import available_host_bytes

MEMINFO = "MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:  2 kB\n"


def test_free_memory_is_the_tighter_of_host_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\nactive_file 200\ninactive_file 100\n")

    # 1000 - 700, and 200 + 100 that can be dropped.
    assert available_host_bytes(meminfo, tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes(meminfo, tmp_path) == 2048
    assert available_host_bytes(tmp_path / "nothing", tmp_path) is None
