"""The prompts of `baton demo`: three questions about texts of different lengths, written for it."""

from __future__ import annotations

_PREFILL = (
    "A language model answers in two phases. In the first one, called prefill, it reads the whole prompt at "
    "once. Thousands of tokens go through every layer together, so the arithmetic units are busy and the "
    "memory is not. The result is a cache: for every token and every layer, the keys and the values that "
    "later tokens will look at. In the second phase, called decode, the model writes one token after the "
    "other. Each step reads all weights and the whole cache to produce a single token, so now the memory is "
    "busy and the arithmetic units wait. When both phases share one device, they get into each other's way: "
    "a long prompt that arrives in the middle of ten conversations stops all ten for as long as it takes to "
    "read it."
)

_SPLIT = (
    "The remedy is to give each phase workers of its own. A router looks at the length of a prompt and puts "
    "it into the queue of its bucket, so that short questions need not wait behind long documents. A prefill "
    "worker takes several prompts, packs them without padding and computes their cache. Meanwhile a decode "
    "worker has already promised enough free blocks to hold it. The cache travels there in pieces, while "
    "later pieces are still being computed, and only when the last piece has been checked does the request "
    "join the batch of the decode worker. The first token does not wait for any of this: the prefill worker "
    "has sampled it and sent it straight to the router, which passes it on to the person who asked."
)

_FAILURE = (
    "Machines fail, and a relay race with a dropped baton is lost. For that reason nobody lets go too early. "
    "The prefill worker keeps its blocks until it hears that the decode worker has everything. The decode "
    "worker keeps its promise only as long as the router renews it, so that blocks never stay reserved for a "
    "request that is gone. A message from a process that was thought dead is recognised by the number of the "
    "attempt it carries, and is refused. If a worker dies, its requests end quickly, either in success at "
    "another worker or in an error that says whether trying again makes sense. Nothing is left behind: no "
    "block, no promise and no counter. The same care applies to a person who closes the window in the middle "
    "of an answer; both workers hear of it and turn to the next request at once."
)

_CLUSTER = (
    "All of this can be watched. The router counts what waits in each bucket. Every request is one trace, "
    "from the client through the router to both workers, so that one picture shows how long it waited, how "
    "long the reservation took, how long the prompt was read, how long the cache travelled and how evenly "
    "the tokens came. The decode workers are actors that Ray places on the machines of a cluster and starts "
    "again when they die, and its dashboard shows where each one runs. A small registry tells the router who "
    "is there. None of these helpers is asked for each token; if one of them is away for a moment, the "
    "answers keep coming."
)

# Label and question; with the model's own chat template they fall into three different buckets.
PROMPTS: tuple[tuple[str, str], ...] = (
    ("a short question", "What is the capital of France? Answer in one sentence."),
    ("a paragraph", f"{_PREFILL}\n\nIn one sentence: why do the two phases disturb each other?"),
    (
        "a page",
        f"{_PREFILL}\n\n{_SPLIT}\n\n{_FAILURE}\n\n{_CLUSTER}\n\nSummarize this text in two sentences.",
    ),
)
