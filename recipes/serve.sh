#!/usr/bin/env bash
# Starts the vLLM server of a population, for `use_vllm: true` and `vllm_mode: server`:
#
#   recipes/serve.sh <base> <members> <rank> [flags of vLLM ...]
#   recipes/serve.sh Qwen/Qwen2.5-7B-Instruct 8 32 --host 127.0.0.1 --port 8000 --tensor-parallel-size 2
#   VLLM_CPU_KVCACHE_SPACE=1 recipes/serve.sh tiny 4 16 --host 127.0.0.1 --port 8000 --dtype float32 \
#       --no-enable-chunked-prefill    # no GPU: a seeded prompt that is read in two parts ends vLLM 0.31's CPU engine
#
# Serve the base in the precision that the trainer computes in: --dtype bfloat16 with `bf16: true`, --dtype float16 with
# `fp16: true`, else the base's `dtype`. The development endpoints and the loading of adapters by path are for the
# trainer alone: bind to an address that only it reaches.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
base=$1 members=$2 rank=$3
shift 3
python=${PYTHON:-python}
if [ "$base" = tiny ]; then
    base=$("$python" -c 'from trl_populora.assets import tiny_base_path; print(tiny_base_path())')
fi
# vLLM serves adapters in these sizes only; a smaller adapter fits into the next one.
for size in 1 8 16 32 64 128 256 320 512; do
    if [ "$rank" -le "$size" ]; then
        break
    fi
done
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_SERVER_DEV_MODE=1
exec "$python" -m vllm.entrypoints.openai.api_server --model "$base" \
    --enable-lora --max-loras "$members" --max-cpu-loras $((2 * members + 1)) --max-lora-rank "$size" \
    --logprobs-mode processed_logprobs "$@"
