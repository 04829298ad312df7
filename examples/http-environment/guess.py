"""An environment of one's own for clora: the model guesses a number from 1 to 100, told "higher" or "lower".

    pip install fastapi uvicorn
    uvicorn guess:app --host 0.0.0.0 --port 8000

It makes its own examples (`generates`), so that an experiment needs no data: `data: {builtin: Generated}`. The protocol
is described in docs/environments.md.
"""

import random
from typing import Any

from fastapi import FastAPI, Header, HTTPException

app = FastAPI()
games: dict[str, int] = {}  # episode -> number
answers: dict[str, Any] = {}  # Idempotency-Key -> answer: a request that comes again is not counted twice

GUESS = {
    "name": "guess",
    "description": "Guesses the number.",
    "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
}


@app.get("/v1/environment")
async def environment() -> dict[str, Any]:
    return {"protocol": 1, "tools": [GUESS], "requiredFields": [], "generates": True}


@app.post("/v1/reset")
async def reset(body: dict[str, Any]) -> dict[str, Any]:
    example = body["example"]
    dice = random.Random(f"{example['seed']}/{example['split']}/{example['index']}")  # noqa: S311
    games[body["episode"]] = dice.randint(1, 100)
    return {"messages": [{"role": "user", "content": "Guess my number. It is between 1 and 100."}]}


@app.post("/v1/step")
async def step(body: dict[str, Any], idempotency_key: str = Header()) -> dict[str, Any]:
    if idempotency_key not in answers:
        answers[idempotency_key] = judge(body)
    return answers[idempotency_key]


@app.post("/v1/close")
async def close(body: dict[str, Any]) -> dict[str, Any]:
    games.pop(body["episode"], None)
    for key in [key for key in answers if key.startswith(body["episode"])]:
        del answers[key]
    return {}


def judge(body: dict[str, Any]) -> dict[str, Any]:
    number = games.get(body["episode"])
    if number is None:
        raise HTTPException(404, "no such episode")
    calls = body["message"]["toolCalls"]
    if not calls:
        return {"reward": 0.0, "done": True}  # it talked instead of guessing
    guess = calls[0]["arguments"].get("number")
    if not isinstance(guess, int):
        said = "error: guess takes one whole number"
        return {"messages": [{"role": "tool", "name": "guess", "content": said}], "toolErrors": 1}
    if guess == number:
        return {"reward": 1.0, "done": True}
    said = "higher" if guess < number else "lower"
    return {"messages": [{"role": "tool", "name": "guess", "content": said}]}
