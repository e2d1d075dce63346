"""`python -m baton.doors_check`: asks one question through each door of a cluster, and compares the answers.

For `helm test` and whoever has just installed a cluster: it waits until it serves. The doors are given by
BATON_ADDRESS and BATON_HTTP_URL; BATON_API_KEY and BATON_TLS_CA hold as for every command. The OpenAI door is
asked with Python's own client, so that nothing of ours is between.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from typing import Any, Final

from baton.client import AsyncClient
from baton.errors import BatonError, ConfigError, Unavailable
from baton.process import report_errors

QUESTION: Final = "What is the capital of France?"
MAX_TOKENS: Final = 8
PAUSE_S: Final = 1.0
ANSWER_WITHIN_S: Final = 60.0


def main() -> int:
    """Entry point. Status 0: both doors gave the same answer; as docs/cli.md says otherwise."""
    parser = argparse.ArgumentParser(prog="python -m baton.doors_check", description=__doc__)
    parser.add_argument("--wait-s", type=float, default=300.0, help="longest wait until it serves")
    options = parser.parse_args()
    return asyncio.run(_compare(options.wait_s))


async def _compare(wait_s: float) -> int:
    url = os.environ.get("BATON_HTTP_URL", "")
    if not url:
        raise ConfigError("BATON_HTTP_URL is not set; give the OpenAI door, as http://host:port", field="url")
    by_grpc = await _asked_by_grpc(wait_s)
    _say(f"gRPC door: {by_grpc!r}")
    by_http = await asyncio.to_thread(_asked_by_http, url)
    _say(f"OpenAI door: {by_http!r}")
    if by_grpc != by_http:
        raise Unavailable("the two doors gave different answers to one question")
    return 0


async def _asked_by_grpc(wait_s: float) -> str:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + wait_s
    is_insecure = os.environ.get("BATON_INSECURE_KEY") == "true"
    while True:
        try:
            async with await AsyncClient.connect(insecure_key=is_insecure) as client:
                messages = [{"role": "user", "content": QUESTION}]
                generation = client.chat(messages, max_tokens=MAX_TOKENS, temperature=0)
                return await generation.text()
        except BatonError as error:
            if not error.retryable or loop.time() > deadline_s:
                raise
            _say(f"not yet: {error.message}")
            await asyncio.sleep(PAUSE_S)


def _asked_by_http(url: str) -> str:
    """Raises Unavailable if the door refuses; the answer of greedy decoding, as the other door is asked."""
    body = {
        "model": _got(f"{url}/v1/models")["data"][0]["id"],
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    return str(_got(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"])


def _got(url: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("BATON_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    ca = os.environ.get("BATON_TLS_CA") or None
    context = ssl.create_default_context(cafile=ca) if url.startswith("https:") else None
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_WITHIN_S, context=context) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read(2_000).decode(errors="replace")
        raise Unavailable(f"{url} answered {error.code}: {said}") from None
    except OSError as error:
        raise Unavailable(f"{url} cannot be reached: {error}") from None


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(report_errors(main))
