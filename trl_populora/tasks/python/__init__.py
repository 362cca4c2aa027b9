"""Tasks about Python programs: three kinds, their words, and what is read from a program's text."""
