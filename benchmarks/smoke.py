"""TTFT, ITL and tokens/s of a running cluster: `python -m benchmarks.smoke [--address HOST:PORT]`.

Three loads, one after another: short prompts one at a time, long prompts one at
a time, and short prompts eight at a time. Times are the client's: from the call to the first
token, and between tokens. Prompts are token ids drawn from a seed, so that no prompt is
another's prefix.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field

from baton import AsyncClient
from baton.bench.percentiles import percentile
from baton.cluster.defaults import DEFAULT_ADDRESS
from benchmarks.report import Row, publish

SHORT_TOKENS = 64
LONG_TOKENS = 1024
OUTPUT_TOKENS = 32
CONCURRENCY = 8


@dataclass(slots=True)
class Samples:
    """What one load yielded: milliseconds, and tokens over its duration."""

    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    duration_s: float = 0.0


async def one(client: AsyncClient, prompt: list[int], samples: Samples) -> None:
    """One request; a chunk of several tokens counts as that many gaps."""
    last = time.perf_counter()
    first = True
    generation = client.generate(
        token_ids=prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=120.0
    )
    async for chunk in generation:
        now = time.perf_counter()
        num_tokens = len(chunk.token_ids)
        if first:
            samples.ttft_ms.append(1000 * (now - last))
        elif num_tokens:
            samples.itl_ms += [1000 * (now - last) / num_tokens] * num_tokens
        first, last = False, now
        samples.num_tokens += num_tokens


async def load(client: AsyncClient, prompts: list[list[int]], concurrency: int) -> Samples:
    """Sends the prompts, `concurrency` at a time."""
    samples = Samples()
    slots = asyncio.Semaphore(concurrency)

    async def limited(prompt: list[int]) -> None:
        async with slots:
            await one(client, prompt, samples)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(limited(prompt))
    samples.duration_s = time.perf_counter() - started
    return samples


def rows(name: str, samples: Samples) -> list[Row]:
    """The metrics of one load."""
    runs = len(samples.ttft_ms)
    return [
        Row(metric=f"{name} ttft p50", unit="ms", ours=percentile(samples.ttft_ms, 50), runs=runs),
        Row(metric=f"{name} ttft p90", unit="ms", ours=percentile(samples.ttft_ms, 90), runs=runs),
        Row(metric=f"{name} itl p50", unit="ms", ours=percentile(samples.itl_ms, 50), runs=runs),
        Row(metric=f"{name} itl p99", unit="ms", ours=percentile(samples.itl_ms, 99), runs=runs),
        Row(
            metric=f"{name} output", unit="tokens/s", ours=samples.num_tokens / samples.duration_s, runs=runs
        ),
    ]


async def run(address: str, num_requests: int, seed: int, json_path: str | None) -> None:
    """Measures and publishes."""
    rng = random.Random(seed)

    def prompts(num_tokens: int, count: int) -> list[list[int]]:
        return [[rng.randrange(100, 1000) for _ in range(num_tokens)] for _ in range(count)]

    async with await AsyncClient.connect(address) as client:
        model = (await client.list_models())[0]
        await load(client, prompts(SHORT_TOKENS, 2), 1)
        results = rows(
            f"{SHORT_TOKENS} tokens x1", await load(client, prompts(SHORT_TOKENS, num_requests), 1)
        )
        results += rows(
            f"{LONG_TOKENS} tokens x1", await load(client, prompts(LONG_TOKENS, max(2, num_requests // 2)), 1)
        )
        results += rows(
            f"{SHORT_TOKENS} tokens x{CONCURRENCY}",
            await load(client, prompts(SHORT_TOKENS, 3 * num_requests), CONCURRENCY),
        )
    kept = publish("smoke", results, json_path, model=model.name, seed=seed)
    print(f"kept as {kept}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="a router's public gRPC address")
    parser.add_argument("--requests", type=int, default=8, help="requests of the first load")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument("--json", help="write the rows here")
    arguments = parser.parse_args()
    asyncio.run(run(arguments.address, arguments.requests, arguments.seed, arguments.json))


if __name__ == "__main__":
    main()
