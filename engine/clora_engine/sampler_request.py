"""Is this a request that vLLM can take? Asked before it is sent, for vLLM would ask too late or not at all.

vLLM checks token ids against a tokenizer, which it is not given. Its core decodes every request strictly, in the one
thread that feeds all tenants: a single value of a wrong type ends that thread, and the core answers nobody any more.
Left out: stop tokens beyond the vocabulary, which vLLM refuses in time.
"""

from __future__ import annotations

from collections.abc import Sequence

from clora_engine.errors import UserError
from clora_engine.types import SamplingParams

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""What vLLM samples with exactly; it would silently raise a lower temperature, and the log-probs with it."""
MAX_TOKENS = 2**31 - 1
SEEDS = 2**63
"""vLLM takes -1 for no seed, and more than 64 bits do not travel."""


def check_request(
    prompt_ids: Sequence[int], n: int, params: SamplingParams, *, vocabulary: int, max_model_len: int
) -> list[int]:
    """The prompt as vLLM wants it. Raises UserError for what is wrong with it, or with n or the parameters."""
    _check_params(n, params)
    if not 0 < len(prompt_ids) < max_model_len:
        raise UserError(
            f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {max_model_len}",
            reason="PromptTooLong" if prompt_ids else None,
            field="data",
        )
    prompt = list(prompt_ids)
    if not _integers(prompt):
        raise UserError("token ids must be integers", field="data")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise UserError(f"token ids must be in [0, {vocabulary})", field="data")
    return prompt


def _check_params(n: int, params: SamplingParams) -> None:
    if not _integers([n, params.max_tokens]) or n < 1 or not 1 <= params.max_tokens <= MAX_TOKENS:
        raise UserError(
            f"n and maxTokens must be integers of at least 1, maxTokens of at most {MAX_TOKENS}",
            field="sampling.maxTokens",
        )
    if not (params.temperature == 0 or MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE):
        raise UserError(
            f"temperature {params.temperature} must be 0 (greedy) or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}]",
            field="sampling.temperature",
        )
    if not _integers(params.stop_token_ids):
        raise UserError("stop token ids must be integers", field="sampling")
    if params.seed is not None and not (_integers([params.seed]) and 0 <= params.seed <= SEEDS - n):
        raise UserError(f"seed must be an integer in [0, 2^63 - n], not {params.seed}", field="sampling")


def _integers(values: Sequence[object]) -> bool:
    """Plain ones: vLLM's core takes neither True nor NumPy's for an integer."""
    return all(type(value) is int for value in values)
