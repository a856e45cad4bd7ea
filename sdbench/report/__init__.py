"""How are records shown: on a terminal, as rows, in tables? Needs no torch."""
