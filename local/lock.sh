#!/usr/bin/env bash
# lock.sh - writes the hash-pinned requirements from pyproject.toml. No index is named in them.
set -euo pipefail
cd "$(dirname "$0")/.."
compile() {
  uv pip compile --quiet --generate-hashes --no-annotate --no-header --python-version "${python:-3.11}" \
    --python-platform x86_64-manylinux_2_28 "$@"
}
compile pyproject.toml --extra cpu --extra operator --extra demo --extra dev --extra parquet --extra tracking \
  --extra trackio -o requirements/cpu.txt
compile pyproject.toml --extra operator -o requirements/operator.txt
echo uv | compile - -o requirements/uv.txt
# For the images in docker/. What clora's engine needs and vLLM's own image (Python 3.12) lacks or has too new:
gpu=$(mktemp)
trap 'rm -f "$gpu"' EXIT
python=3.12 compile pyproject.toml --extra gpu --extra parquet --extra tracking --extra trackio -o "$gpu"
tracking="databricks-sdk gitdb gitpython google-auth importlib-metadata mlflow-skinny platformdirs pyasn1 pyasn1-modules"
tracking+=" smmap sqlparse wandb xxhash zipp" # what the extra adds to vLLM's dependencies
trackio="brotli gradio-client trackio" # and what that one adds
printf '%s\n' accelerate peft pyarrow simpleeval tensorboardX transformers $tracking $trackio |
  python=3.12 compile --no-deps --constraint "$gpu" - -o requirements/engine-on-vllm.txt
compile pyproject.toml --extra cpu --extra parquet --extra tracking --extra trackio --constraint requirements/cpu.txt \
  -o requirements/engine-cpu.txt
echo hatchling | compile --constraint requirements/cpu.txt - -o requirements/build.txt
# The peers of benchmarks/peers, each for an environment of its own: TRL beside clora's torch, transformers and PEFT.
# Of clora they import what plays episodes. SkyRL needs aiohttp too, which it does not declare, and Python 3.12.
clora="aiohttp msgspec pydantic pyyaml regex simpleeval"
printf '%s\n' trl==1.16.0 peft datasets $clora |
  compile --constraint requirements/cpu.txt - -o requirements/peer-trl.txt
printf '%s\n' 'skyrl[jax,tinker]==0.4.0' tinker==0.25.0 torch==2.13.0 $clora |
  python=3.12 compile - -o requirements/peer-skyrl.txt
# For a container of its own. verifiers 0.3.1 is the last with the environments of load_environment.
printf '%s\n' verifiers==0.3.1 aiohttp pydantic | compile - -o examples/verifiers-environment/requirements.txt
