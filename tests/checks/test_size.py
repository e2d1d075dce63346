"""The size report finds what is too long and nothing else."""

from __future__ import annotations

from pathlib import Path

from checks.size import complaints, functions


def write(root: Path, text: str) -> Path:
    path = root / "baton" / "module.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def body(num_lines: int) -> str:
    return "    a = 1\n" * num_lines


def test_a_function_of_60_lines_passes_and_one_of_61_does_not(tmp_path: Path) -> None:
    path = write(tmp_path, f"def good():\n{body(59)}\n\nasync def bad():\n{body(60)}")
    assert complaints(tmp_path) == [f"{path}:63 bad: 61 lines, too long"]


def test_a_docstring_does_not_count(tmp_path: Path) -> None:
    path = write(tmp_path, f'def documented():\n    """One.\n\n    Two.\n    """\n{body(2)}')
    assert [function.num_lines for function in functions(path)] == [3]


def test_a_kernel_may_have_100_lines(tmp_path: Path) -> None:
    path = write(tmp_path, f"@triton.jit\ndef good():\n{body(99)}\n\n@triton.jit\ndef bad():\n{body(100)}")
    assert complaints(tmp_path) == [f"{path}:105 bad: 101 lines, too long"]


def test_methods_and_inner_functions_are_measured(tmp_path: Path) -> None:
    path = write(
        tmp_path, f"class A:\n    def m(self):\n        def inner():\n{body(3).replace('    ', ' ' * 12)}"
    )
    assert {function.place.split()[-1]: function.num_lines for function in functions(path)} == {
        "m": 5,
        "inner": 4,
    }


def test_a_file_of_400_lines_passes_and_one_of_401_does_not(tmp_path: Path) -> None:
    path = write(tmp_path, "a = 1\n" * 400)
    assert complaints(tmp_path) == []
    path.write_text("a = 1\n" * 401)
    assert complaints(tmp_path) == [f"{path}: 401 lines, at most 400"]


def test_generated_code_is_not_measured(tmp_path: Path) -> None:
    folder = tmp_path / "baton" / "v1"
    folder.mkdir(parents=True)
    (folder / "long_pb2.py").write_text("a = 1\n" * 500)
    assert complaints(tmp_path) == []
