"""Generation with vLLM, one LoRA request per row (phases 2 and 4). Imported only when `use_vllm` is on."""
