from __future__ import annotations

from pathlib import Path

from baton.cluster.guard import Guard, follow


def test_a_group_is_known_until_it_is_forgotten() -> None:
    lines = ["+10\n", "+11\n", "-10\n", "+12\n", "-12\n", "+12\n", "=/tmp/a b\n"]
    assert follow(lines) == ({11, 12}, {"/tmp/a b"})


def test_forgetting_an_unknown_group_is_harmless() -> None:
    assert follow(["-10\n"]) == (set(), set())


async def test_its_folder_is_gone_after_an_orderly_end(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    (folder / "inner").mkdir(parents=True)
    async with Guard() as guard:
        guard.own(folder)
        assert folder.is_dir()
    assert not folder.exists()
    assert tmp_path.is_dir()
