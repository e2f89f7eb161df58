"""An agent's loop: one question becomes 20 generations at once, from zero, and one answer.

    python examples/agent.py URL APP [COUNT]        the API key is read from NAGARA_KEY

Agents call a model in bursts: nothing for minutes, then many requests together. nagara holds
them while replicas come up, gives each replica as many as it can take, and folds them away after.
"""

import asyncio
import os
import sys
import time
from dataclasses import dataclass

import aiohttp

_IDEAS = (
    "a name for a small cat", "a colour of the sky", "something to eat in summer", "a short word",
    "a way to say hello", "an animal with wings", "a river in Europe", "a thing made of wood",
)  # fmt: skip


@dataclass(frozen=True)
class Thought:
    text: str
    replica: str
    queue_ms: float
    cold_start_ms: float
    elapsed_s: float


async def think(session: aiohttp.ClientSession, app: str, prompt: str) -> Thought:
    """One generation. A 429 or 503 says when to try again."""
    body = {"model": app, "max_tokens": 12, "temperature": 0.8,
            "messages": [{"role": "user", "content": prompt}]}  # fmt: skip
    begun_s = time.monotonic()
    for _ in range(5):
        async with session.post(f"/{app}/v1/chat/completions", json=body) as answer:
            if answer.status in (429, 503):
                await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
                continue
            answer.raise_for_status()
            document = await answer.json()
            return Thought(
                text=document["choices"][0]["message"]["content"].strip(),
                replica=answer.headers["x-nagara-replica"],
                queue_ms=float(answer.headers["x-nagara-queue-ms"]),
                cold_start_ms=float(answer.headers["x-nagara-cold-start-ms"]),
                elapsed_s=time.monotonic() - begun_s,
            )
    raise RuntimeError(f"{app} has no place for this request")


async def main(url: str, app: str, count: int) -> None:
    headers = {"Authorization": f"Bearer {os.environ['NAGARA_KEY']}"}
    patience = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        url, headers=headers, timeout=patience, connector=connector
    ) as session:
        prompts = [f"Say {_IDEAS[number % len(_IDEAS)]}." for number in range(count)]
        begun_s = time.monotonic()
        thoughts = await asyncio.gather(*(think(session, app, prompt) for prompt in prompts))
    for prompt, thought in zip(prompts, thoughts, strict=True):
        print(f"{thought.elapsed_s:6.2f} s  {prompt:<36} {' '.join(thought.text.split())}")
    cold = sum(thought.cold_start_ms > 0 for thought in thoughts)
    replicas = {thought.replica for thought in thoughts}
    print(
        f"{count} generations in {time.monotonic() - begun_s:.2f} s by {len(replicas)} replicas; "
        f"{cold} waited for a start"
    )


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: NAGARA_KEY=... python examples/agent.py URL APP [COUNT]")
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) == 4 else 20))
