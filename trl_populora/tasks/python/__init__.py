"""Tasks about Python programs.

kinds.py        the kinds code_o, code_i and code_f, and `make_task`
prompts.py      all texts that models are shown, and the solved examples
reading.py      reads the fenced blocks of a completion
programs.py     parses untrusted program text within bounds
normal_form.py  when two programs count as the same one
complexity.py   how demanding a program is, and how many shapes of programs a run has seen
"""
