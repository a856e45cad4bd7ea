"""How are fresh measuring processes started and what became of them? Needs no torch."""
