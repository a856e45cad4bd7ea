"""What did a run do: its times, its memory, its machine, and the record of all that."""
