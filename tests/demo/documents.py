"""Documents that end with a question, with a given number of tokens of the model's own tokenizer."""

from __future__ import annotations

import random

from servers.models import words
from servers.vllm_server import VllmClient

_SUBJECTS = [
    "The harbour master",
    "A night train",
    "Her grandmother",
    "The old observatory",
    "The ferry",
    "The council",
]
_VERBS = ["remembered", "repaired", "described", "painted", "measured", "lost", "inherited", "photographed"]
_OBJECTS = ["the lighthouse", "a box of letters", "three winters of snow", "the bridge", "a map", "forty brass bells"]
_ENDS = ["before the war", "in one afternoon", "without telling anyone", "for the museum", "at the edge of town"]


def document(server: VllmClient, seed: int, tokens: int, *, real: bool) -> tuple[str, int]:
    """A document and its number of tokens: sentences for a real model, words of its vocabulary for a random one."""
    if not real:
        text = words(tokens, 9000 + seed)
        return text, server.count_tokens(text)
    chosen = random.Random(seed)

    def sentence() -> str:
        return f"{chosen.choice(_SUBJECTS)} {chosen.choice(_VERBS)} {chosen.choice(_OBJECTS)} {chosen.choice(_ENDS)}."

    sentences = [sentence() for _ in range(tokens // 8)]
    question = f"\n\nQuestion: what is said of {chosen.choice(_OBJECTS)}?\nAnswer:"
    kept = len(sentences) * tokens // max(1, server.count_tokens(" ".join(sentences)))
    text = f"Document {seed + 1}. " + " ".join(sentences[:kept]) + question
    return text, server.count_tokens(text)
