"""The mechanism itself: what it finds in a document, and that it notices what does not happen."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from tests.docs.snippets import Snippet, blocks, differences, is_printed

DOCUMENT = """\
# A guide

```python
import asyncio
await asyncio.sleep(0)
print("one", "two")
```

```text
one ...
```

```python no-run
raise RuntimeError
```

Some words.

```python
x = 1
```

More words.

```text
not its output
```
"""


def test_programs_are_found_with_what_they_print(tmp_path: Path) -> None:
    path = tmp_path / "guide.md"
    path.write_text(DOCUMENT, encoding="utf-8")
    first, second = blocks(path)
    assert (first.place, second.place) == ("guide.md:3", "guide.md:19")
    assert (first.printed, second.printed) == ("one ...\n", None)
    assert is_printed(first.run({}), "one ...\n")
    assert not is_printed(first.run({}), "two\n")
    assert second.run({}) == ""


def test_a_program_that_fails_is_noticed() -> None:
    with pytest.raises(NameError):
        Snippet("guide.md:1", "print(nowhere)\n", None).run({})


def test_addresses_are_replaced() -> None:
    assert Snippet("guide.md:1", 'print("here:1")\n', None).run({"here:1": "there:2"}) == "there:2\n"


@pytest.mark.parametrize(
    ("text", "is_true"),
    [
        (">>> 1 + 1\n2\n", True),
        (">>> 1 + 1\n3\n", False),
        (">>> import asyncio\n>>> x = await asyncio.sleep(0, 5)\n>>> x\n5\n", True),
        (">>> 1 / 0\nTraceback (most recent call last):\nZeroDivisionError: division by zero\n", True),
        (">>> 1 / 1\nTraceback (most recent call last):\nZeroDivisionError: division by zero\n", False),
        (">>> 1 / 0\n", False),
        (">>> 1 + 1  # doctest: +SKIP\n3\n", True),
    ],
)
def test_examples_are_true_or_not(text: str, is_true: bool) -> None:
    test = doctest.DocTestParser().get_doctest(text, {}, "name", None, None)
    assert (differences(test, {}) == []) == is_true
