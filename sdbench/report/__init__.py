"""How records are read, and tables, plots and pages written. Needs no torch."""
