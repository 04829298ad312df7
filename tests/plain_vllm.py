"""vLLM as it comes, without clora: which of the bugs that clora works around does it still have?

    python -m tests.plain_vllm MODEL ADAPTERS OUT

writes {name of the bug: whether it is there} as JSON. One engine in this process, so that what would end vLLM's core
process is an exception here; those that may leave the engine unusable come last. ADAPTERS: an empty directory.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest

from tests.sampler_fixtures import Judge, prompt, write_adapter

PROMPT, LONG_PROMPT = prompt(0), prompt(1, 96)
TOKENS, IN_FLIGHT_AFTER = 12, 3
SLOTS = 2
Ids = tuple[int, ...]


class Plain:
    """The engine, and the judge of what it should answer."""

    def __init__(self, model: Path, adapters: Path) -> None:
        self.model, self.adapters, self.judge = model, adapters, Judge(model)
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=512, max_num_seqs=16,
                kv_cache_memory_bytes=1 << 26, enforce_eager=True, block_size=32, enable_prefix_caching=True,
                enable_chunked_prefill=True, max_num_batched_tokens=64, enable_lora=True, max_loras=SLOTS,
                max_cpu_loras=SLOTS, max_lora_rank=8,
            )
        )  # fmt: skip
        self._names, self._requests = count(1), count()

    def adapter(self, seed: int, *, load: bool = True, in_place: bool = False) -> LoRARequest:
        """A new adapter with an id of its own."""
        number = next(self._names)
        directory = write_adapter(self.adapters / str(number), self.model, seed=seed)
        request = LoRARequest(f"a{number}", number, str(directory), load_inplace=in_place)
        if load:
            self.engine.add_lora(request)
        return request

    def right(self, adapter: LoRARequest | None, ids: list[int] = PROMPT) -> Ids:
        (answer,) = Judge(self.model).greedy(Path(adapter.lora_path) if adapter else None, [ids], TOKENS)
        return answer

    def ask(
        self,
        *adapters: LoRARequest | None,
        ids: list[int] = PROMPT,
        seed: int | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[Ids]:
        """A greedy answer (at temperature 1 with a seed) under each adapter, all at once; `meanwhile` comes after a few
        steps."""
        params = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=TOKENS, ignore_eos=True,
                                detokenize=False)  # fmt: skip
        names = [str(next(self._requests)) for _ in adapters]
        for name, adapter in zip(names, adapters, strict=True):
            self.engine.add_request(name, tokens_input(ids), params, lora_request=adapter)
        answers: dict[str, Ids] = {}
        for step in count():
            if step == IN_FLIGHT_AFTER:
                meanwhile()
            for output in self.engine.step():
                if output.finished:
                    answers[output.request_id] = tuple(output.outputs[0].token_ids)
            if not self.engine.has_unfinished_requests():
                return [answers[name] for name in names]
        raise AssertionError

    def forget(self, *adapters: LoRARequest) -> None:
        for adapter in adapters:
            self.engine.remove_lora(adapter.lora_int_id)


def base_rows_wrong_when_all_slots_are_full(vllm: Plain) -> bool:
    one, two = vllm.adapter(1), vllm.adapter(2)
    assert vllm.ask(one, two) == [vllm.right(one), vllm.right(two)]
    base, *_ = vllm.ask(None, one, two)
    vllm.forget(one, two)
    return base != vllm.right(None)


def load_inplace_reads_the_disk_at_every_step(vllm: Plain) -> bool:
    reads = 0
    original = LoRAModel.from_local_checkpoint

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal reads
        reads += 1
        return original(*args, **kwargs)

    LoRAModel.from_local_checkpoint = counted
    try:
        adapter = vllm.adapter(1, in_place=True)
        vllm.ask(adapter)
    finally:
        LoRAModel.from_local_checkpoint = original
    vllm.forget(adapter)
    return reads > TOKENS // 2


def prefix_cache_stale_after_a_reload_on_the_same_path(vllm: Plain) -> bool:
    adapter = vllm.adapter(1)
    before = vllm.right(adapter, LONG_PROMPT)
    assert vllm.ask(adapter, ids=LONG_PROMPT) == [before]
    _rewrite(vllm, adapter, seed=2)
    vllm.engine.add_lora(LoRARequest(adapter.lora_name, adapter.lora_int_id, adapter.lora_path, load_inplace=True))
    (after,) = vllm.ask(adapter, ids=LONG_PROMPT)
    vllm.forget(adapter)
    return after != vllm.right(adapter, LONG_PROMPT)


def add_lora_of_a_loaded_id_changes_nothing(vllm: Plain) -> bool:
    adapter = vllm.adapter(1)
    before = vllm.right(adapter)
    _rewrite(vllm, adapter, seed=2)
    confirmed = vllm.engine.add_lora(adapter)
    (after,) = vllm.ask(adapter)
    vllm.forget(adapter)
    return bool(confirmed) and after == before != vllm.right(adapter)


def adapter_removed_in_flight_comes_back(vllm: Plain) -> bool:
    adapter = vllm.adapter(1)
    vllm.ask(adapter, meanwhile=lambda: vllm.forget(adapter))
    back = adapter.lora_int_id in vllm.engine.list_loras()
    vllm.forget(adapter)
    return back


def slot_given_away_under_requests_in_flight(vllm: Plain) -> bool:
    adapter = vllm.adapter(1)
    others: list[LoRARequest] = []

    def give_away() -> None:
        vllm.forget(adapter)
        others.append(vllm.adapter(2))

    (answer,) = vllm.ask(adapter, meanwhile=give_away)
    vllm.forget(adapter, *others)
    return answer != vllm.right(adapter)


def missing_adapter_path_ends_the_core(vllm: Plain) -> bool:
    adapter = vllm.adapter(1, load=False)
    shutil.rmtree(adapter.lora_path)
    return _step_fails(vllm, [adapter], match="No adapter found")


def seed_with_chunked_prefill_ends_the_core(vllm: Plain) -> bool:
    return _step_fails(vllm, [None] * 3, ids=LONG_PROMPT, seed=7, match="offset")


BUGS: tuple[Callable[[Plain], bool], ...] = (
    base_rows_wrong_when_all_slots_are_full,
    load_inplace_reads_the_disk_at_every_step,
    prefix_cache_stale_after_a_reload_on_the_same_path,
    add_lora_of_a_loaded_id_changes_nothing,
    adapter_removed_in_flight_comes_back,
    slot_given_away_under_requests_in_flight,
    seed_with_chunked_prefill_ends_the_core,
    missing_adapter_path_ends_the_core,
)


def _rewrite(vllm: Plain, adapter: LoRARequest, seed: int) -> None:
    shutil.rmtree(adapter.lora_path)
    write_adapter(Path(adapter.lora_path), vllm.model, seed=seed)


def _step_fails(
    vllm: Plain, adapters: Sequence[LoRARequest | None], *, match: str, ids: list[int] = PROMPT, seed: int | None = None
) -> bool:
    """In a core process of its own, whatever a step raises ends it."""
    try:
        vllm.ask(*adapters, ids=ids, seed=seed)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        if match not in str(error):
            raise
        return True
    return False


def main() -> None:
    model, adapters, out = map(Path, sys.argv[1:])
    vllm = Plain(model, adapters)
    found = {bug.__name__: bug(vllm) for bug in BUGS}
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
