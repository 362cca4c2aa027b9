"""`populora evaluate`: every member of a population on the benchmarks that people quote.

    suite.py       the ten benchmarks and what EvalScope is told about each
    settings.py    the command's options
    contenders.py  who is evaluated: members, base, adapters of other runs
    server.py      one vLLM server that holds them all as LoRA modules
    processes.py   how processes are started so that none is left behind
    jobs.py        one process per contender, side by side; what is finished is not done again
    worker.py      that process: EvalScope against the server
    code.py        where programs that models write are run: our sandbox
    table.py       benchmark by contender, as text, Markdown, JSON and picture
    command.py     all of it in order

EvalScope asks, extracts and grades; nothing here knows a benchmark's questions. Needs the `eval` extra (EvalScope,
matplotlib, rich), and vLLM unless a running server is named.
"""
