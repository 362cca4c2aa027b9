"""Generation, in which each row has the adapter of its member: by transformers, or by vLLM.

transformers.py  generates with transformers: reads a prompt once, and drops ended rows or uses a CUDA graph
player.py        lets members answer without a trainer; says which tokens end a completion
checks.py        refuses what vLLM cannot serve, before the trainer loads the base
vllm.py          adapts TRL's vLLM generation: one adapter per row
engine.py        the vLLM engine in the trainer's process; cannot be imported without vLLM
server.py        the client of vLLM servers, over HTTP
publish.py       finds members that changed, keeps their weights for servers, merges equal requests
"""
