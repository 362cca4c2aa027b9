"""Generation, one adapter per row: with transformers, or with vLLM in this process or on servers.

transformers.py  a prompt is read once, ended rows leave, tokens come from CUDA graphs
player.py        members answer without a trainer; what ends a completion
checks.py        what vLLM generation refuses before any model is loaded
vllm.py          TRL's vLLM generation with one adapter per row
engine.py        the colocated engine; imports vLLM
server.py        servers over HTTP
publish.py       which members changed, and where their weights lie for vLLM
"""
