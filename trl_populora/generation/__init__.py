"""Generation with vLLM, one LoRA request per row. Imported only when `use_vllm` is on."""
