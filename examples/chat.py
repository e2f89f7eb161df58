"""Chat with a model folder in the terminal: `python -m examples.chat FOLDER`.

Uses the engine as a library, without any server.
"""

import asyncio
import sys

from nagara.engine.engine import Engine
from nagara.engine.request import SamplingParams

ANSWER_TOKENS = 256


async def chat(engine: Engine) -> None:
    messages: list[dict[str, str]] = []
    while text := await asyncio.to_thread(input, "you: "):
        messages.append({"role": "user", "content": text})
        prompt = engine.tokenizer.chat_prompt(messages, None)
        while len(prompt) + ANSWER_TOKENS > engine.context and len(messages) > 1:
            del messages[0]  # what was said first is forgotten first
            prompt = engine.tokenizer.chat_prompt(messages, None)
        params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.7)
        answer = ""
        async for piece in engine.stream(prompt, params):
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            answer += piece.text
        sys.stdout.write("\n")
        messages.append({"role": "assistant", "content": answer})


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.chat FOLDER")
    engine = Engine(sys.argv[1])
    engine.start()
    try:
        asyncio.run(chat(engine))
    except EOFError:
        sys.stdout.write("\n")
    finally:
        engine.close()


if __name__ == "__main__":
    main()
