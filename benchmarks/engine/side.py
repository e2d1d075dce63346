"""What each engine's process answers: how long prompts take to their first tokens, and further tokens.

Runs in environments of others too: nothing but the standard library is imported here. A question is a line of
JSON on standard input, {"prompts": [lengths], "tokens": n}: all prompts at once, n tokens of each. The answer
is a line {"seconds": ...} on standard output, from the question's arrival to the last token.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

# (prompts, number of tokens of each answer, none of which may be the last before that).
Generate = Callable[[list[list[int]], int], None]
# Below it are tokens that mean something to a model.
FIRST_TOKEN = 100


def prompt(length: int, number: int, vocab_size: int) -> list[int]:
    """Token ids, others for each number: no prefix is shared as long as the vocabulary has enough."""
    return [FIRST_TOKEN + (number * 7919 + at * 104_729) % (vocab_size - FIRST_TOKEN) for at in range(length)]


def answer(load: Callable[[str, int], Generate]) -> None:
    """Serves an engine until standard input ends. load: of a model's folder and a number of threads.

    Those are the first arguments, the third is the size of the vocabulary. What the engine itself prints goes
    to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder, threads, vocab_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    generate = load(folder, threads)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    number = 0
    for line in sys.stdin:
        question = json.loads(line)
        prompts = []
        for length in question["prompts"]:
            number += 1
            prompts.append(prompt(length, number, vocab_size))
        began = time.perf_counter()
        generate(prompts, question["tokens"])
        print(json.dumps({"seconds": time.perf_counter() - began}), file=answers, flush=True)
