"""What clora adds inside vLLM's own processes. vLLM loads it by the entry point `vllm.general_plugins`.

The plugin is inert unless clora's sampler started the process (`ENGINE_PID` is set): another vLLM that is installed in
the same environment is left as it is. Every core and worker process ends with the engine that started it. On vLLM's CPU
platform LoRA is computed by `lora_kernel.cpp` in place of the stock kernel, which is wrong for base-model rows when all
LoRA slots are full, and several times slower; and tokens are drawn by `cpu_sampling.py`. On a GPU nothing is changed
but that, as everywhere, versions are loaded in two calls (`read_ahead.py`).
"""

from __future__ import annotations

import os

ENGINE_PID = "CLORA_ENGINE_PID"
"""Environment variable with the process id of the engine that started vLLM."""

KERNEL = "CLORA_LORA_KERNEL"
"""Environment variable with the path of the compiled LoRA kernel, on a CPU."""


def register() -> None:
    """Entry point; vLLM calls it once in each of its processes, the engine's own included."""
    engine_pid = os.environ.get(ENGINE_PID)
    if engine_pid is None:
        return
    if int(engine_pid) != os.getpid():
        from clora_engine.vllm_plugin.parent import end_with

        end_with(int(engine_pid))

    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        kernel = "clora_engine.vllm_plugin.cpu_wrapper.KernelPunicaWrapper"
        type(current_platform).get_punica_wrapper = classmethod(lambda cls: kernel)

        from clora_engine.vllm_plugin import cpu_sampling

        cpu_sampling.install()
