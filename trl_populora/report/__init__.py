"""Pictures, tables and a page of a run, from the files that it leaves."""
