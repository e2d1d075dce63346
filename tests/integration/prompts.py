"""Prompts of every kind: lengths from 1 to 1,500 tokens, around block borders, in several scripts."""

from __future__ import annotations

from tokenizers import Tokenizer

ENGLISH = (
    "The harbor master kept two books. In the first she wrote down every ship that came in, its length "
    "and what it carried; in the second, only those that left again. On quiet evenings she compared them "
    "and wondered about the difference. A ship that stays is not lost, she told the boy who swept the "
    "office, it has merely stopped being a matter of timetables. "
)
CODE = (
    "def merge(left, right):\n    merged = []\n    while left and right:\n"
    "        source = left if left[0] <= right[0] else right\n        merged.append(source.pop(0))\n"
    "    return merged + left + right\n\n\nclass Account:\n    def __init__(self, owner, balance=0):\n"
    "        self.owner = owner\n        self.balance = balance\n\n"
)
CHINESE = (
    "春天的早晨，河边的柳树发出了新芽。老人牵着孩子慢慢地走，"
    "一边走一边讲从前的故事。孩子问：河水流到哪里去了？"
)
EMOJI = "Weather: ☀️ in the morning, 🌧️ at noon, 🌈 after three. Bring an ☂️ and a 😀! 👩‍👩‍👧 welcome. "
TEXTS = (ENGLISH, CODE, CHINESE, EMOJI)

BLOCK = 16
# One, the borders of one, two and eight blocks, the edges of the length buckets, and long ones.
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 100, 127, 128, 129, 200, 256, 383, 512, 700, 1500)


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """One prompt per length, the texts taking turns; token ids."""
    made = []
    for index, length in enumerate(LENGTHS):
        text = TEXTS[index % len(TEXTS)]
        ids = tokenizer.encode(text * (2 + 3 * length // len(text) + length // 20)).ids
        assert len(ids) >= length, "the text must be long enough to be cut"
        made.append(ids[:length])
    return made
